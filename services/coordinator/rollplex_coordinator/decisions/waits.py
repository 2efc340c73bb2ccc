"""Everything the coordinator waits for: what, from whom, since when, until when. Pure; the caller brings the time.

    sent ──► not yet received ──ack deadline──► WaitError (the message was lost, or the process does not read)
         └─► received ──section deadline, pushed out by progress──► WaitError (hung)

A wait ends by its answer, by an error that names it, or by its peer's death (I8).
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from rollplex.errors import StateError, WaitError


class Wait(Struct, kw_only=True):
    """One instruction that has not been answered."""

    cause: int
    what: str
    peer: str
    since_s: float
    section_s: float
    ack_by_s: float | None
    due_s: float


class Waits:
    """The open waits by cause id."""

    def __init__(self) -> None:
        self._waits: dict[int, Wait] = {}
        self._progress: dict[str, int] = {}

    def add(self, *, cause: int, what: str, peer: str, now_s: float, ack_s: float | None, section_s: float) -> None:
        """An instruction was sent: to be received within `ack_s` (if any) and answered `section_s` after progress."""
        self._waits[cause] = Wait(
            cause=cause,
            what=what,
            peer=peer,
            since_s=now_s,
            section_s=section_s,
            ack_by_s=None if ack_s is None else now_s + ack_s,
            due_s=now_s + section_s,
        )

    def received(self, cause: int, peer: str) -> None:
        """The peer has the instruction."""
        wait = self._waits.get(cause)
        if wait is not None and wait.peer == peer:
            wait.ack_by_s = None

    def progressed(self, peer: str, progress: int, now_s: float) -> None:
        """The peer's work moved: its sections start anew."""
        if self._progress.get(peer) != progress:
            self._progress[peer] = progress
            for wait in self._waits.values():
                if wait.peer == peer:
                    wait.due_s = now_s + wait.section_s

    def touch(self, cause: int, now_s: float) -> None:
        """A partial answer came (a group of a decode unit)."""
        wait = self._waits.get(cause)
        if wait is not None:
            wait.ack_by_s = None
            wait.due_s = now_s + wait.section_s

    def answered(self, cause: int, peer: str) -> Wait:
        """The wait is over.

        Raises:
            StateError: nobody waits for this, or not from this peer.
        """
        wait = self._waits.get(cause)
        if wait is None or wait.peer != peer:
            raise StateError(
                "an answer that nobody waits for",
                got=f"answer to {cause} from {peer}",
                needed=f"one of {[(w.cause, w.what, w.peer) for w in self._waits.values()]}",
            )
        return self._waits.pop(cause)

    def drop_peer(self, peer: str) -> list[Wait]:
        """The peer is gone; what was awaited from it."""
        self._progress.pop(peer, None)
        gone = [wait for wait in self._waits.values() if wait.peer == peer]
        for wait in gone:
            del self._waits[wait.cause]
        return gone

    def drop(self, cause: int) -> None:
        """The answer is not wanted any more; nothing happens if there is no such wait."""
        self._waits.pop(cause, None)

    def clear(self) -> None:
        """The run ends: nothing is awaited any more."""
        self._waits.clear()

    @property
    def open(self) -> list[Wait]:
        """Oldest first."""
        return sorted(self._waits.values(), key=lambda wait: wait.since_s)

    def next_deadline(self) -> float | None:
        """The earliest moment at which `check` could raise."""
        moments = [w.due_s if w.ack_by_s is None else min(w.due_s, w.ack_by_s) for w in self._waits.values()]
        return min(moments, default=None)

    def check(self, now_s: float, silent: Collection[str] = ()) -> None:
        """Raise for the oldest wait whose deadline has passed.

        Args:
            silent: peers that have given no sign of life for long. One of those that were told the same as an overdue
                one is named instead: it is what the other waits for.

        Raises:
            WaitError: names what was awaited, from whom and since when.
        """
        for wait in self.open:
            age = now_s - wait.since_s
            if wait.ack_by_s is not None and now_s >= wait.ack_by_s:
                raise WaitError(
                    f"{wait.peer} did not receive an instruction: {wait.what}",
                    got=f"no acknowledgement for {age:.1f} s",
                    needed=f"one within {wait.ack_by_s - wait.since_s:.1f} s",
                    do="Its log shows what its message thread did; deadlines.ack_s sets the limit.",
                    where=wait.peer,
                )
            if now_s >= wait.due_s:
                late = self._behind(wait, silent)
                quiet = ", and no sign of life" if late.peer in silent else ""
                raise WaitError(
                    f"{late.peer} did not finish: {late.what}",
                    got=f"no progress for {late.section_s:.1f} s, {age:.1f} s after it was asked{quiet}",
                    needed=f"progress within {late.section_s:.1f} s",
                    do="Its log shows where it stands (kill -USR1 its pid for stacks); deadlines.* set the limit.",
                    where=late.peer,
                )

    def _behind(self, wait: Wait, silent: Collection[str]) -> Wait:
        if wait.peer in silent:
            return wait
        return next((other for other in self.open if other.what == wait.what and other.peer in silent), wait)
