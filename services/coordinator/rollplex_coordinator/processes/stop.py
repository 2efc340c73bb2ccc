"""How the end of a run is asked for: by a signal, by HTTP, by a worker that was told to leave.

Owns the request, not the ending: `run` unwinds on `StopRun` wherever it stands, except between BEGIN and COMMIT, which
are finished first (`Link.begin_atomic`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress

from msgspec import Struct

from rollplex.stop_signals import EXIT_INTERRUPTED, STOP_SIGNALS, to_take


class StopRun(Exception):  # noqa: N818 - a request, not an error
    """Unwinds the run from wherever it stands. `exit_code`: 0 for SIGTERM, SIGHUP and HTTP, 130 for SIGINT."""

    def __init__(self, *, source: str, exit_code: int) -> None:
        super().__init__(f"stopped by {source}")
        self.source = source
        self.exit_code = exit_code


class Signals(Struct, kw_only=True):
    """SIGINT, SIGTERM and SIGHUP as an event of the loop: a descriptor becomes readable; handlers do nothing else.

    The interpreter writes to it in the signal itself: a handler would be too late for a loop that just falls asleep.
    A second signal while the run is ending calls `escalate`.
    """

    read_fd: int
    write_fd: int
    received: list[int]
    escalate: Callable[[], None] = lambda: None

    @classmethod
    def install(cls) -> Signals:
        """Take over these signals for this process; SIGHUP unless it is ignored (nohup). Main thread only."""
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signals = cls(read_fd=read_fd, write_fd=write_fd, received=[])

        def note(signum: int, _frame: object) -> None:
            signals.received.append(signum)
            if len(signals.received) > 1:
                signals.escalate()

        for signum in to_take():
            signal.signal(signum, note)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        # Whoever started us holds them back until here, so that Python's own start is not interrupted (cli/signals.py).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return signals

    def stop_asked(self) -> StopRun | None:
        """The stop that the first received signal asks for; None if there was none."""
        with suppress(BlockingIOError):
            os.read(self.read_fd, 64)
        if not self.received:
            return None
        first = self.received[0]
        code = EXIT_INTERRUPTED if first == signal.SIGINT else 0
        return StopRun(source=signal.Signals(first).name, exit_code=code)
