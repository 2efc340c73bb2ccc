"""How much work is wanted, and how it may end. Pure: requests in, the next thing to do out.

wanted > done ─► iterate      checkpoint wanted, or due ─► checkpoint      else ─► idle (serve) or end
"""

from __future__ import annotations

from rollplex.errors import StateError
from rollplex.journal.events import StopWhen
from rollplex.journal.phases import MOST_ITERATIONS


class Work:
    """Iterations that are wanted.

    Args:
        wanted: to begin with.
        serve: stay when there is nothing to do, for the next start.
        done: before this process, in a run that goes on.
    """

    def __init__(self, wanted: int, *, serve: bool, done: int = 0) -> None:
        self.wanted = wanted
        self.done = done
        self.running = False
        """An iteration has begun and is not over."""
        self.stopping: StopWhen | None = None
        self.checkpoint_wanted = False
        self._serve = serve

    def start(self, count: int) -> None:
        """Want so many more.

        Raises:
            StateError: the run is ending, or would never end.
        """
        if self.stopping is not None:
            raise StateError(
                "the run is stopping", got=f"start {count}", needed="a run that goes on", do="Start it again."
            )
        wanted = max(self.wanted, self.done + self.running) + count
        if wanted > MOST_ITERATIONS:
            raise StateError(
                "no run has so many iterations", got=f"{wanted} in all", needed=f"at most {MOST_ITERATIONS}"
            )
        self.wanted = wanted

    def stop_after_iteration(self, *, end: bool) -> None:
        """No further iteration begins; then the run ends, or waits for the next start."""
        self.wanted = self.done + self.running
        if end:
            self.stopping = StopWhen.AFTER_ITERATION
            self._serve = False

    @property
    def iterate(self) -> bool:
        """Another iteration is to begin."""
        return self.stopping is None and self.done < self.wanted

    @property
    def stay(self) -> bool:
        """There is nothing to do, and the run goes on."""
        return self._serve and self.stopping is None

    @property
    def last(self) -> bool:
        """No further iteration follows, as things stand."""
        return not self.iterate and not self.stay
