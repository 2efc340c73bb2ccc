"""SIGINT, SIGTERM and SIGHUP where something must be put right before the end: a terminal without cursor, for one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rollplex.stop_signals import EXIT_INTERRUPTED, STOP_SIGNALS, to_take


class Interrupted(BaseException):
    """A signal came. Not an error: whoever called `interruptible` catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = EXIT_INTERRUPTED if number == signal.SIGINT else 0


@contextmanager
def interruptible() -> Iterator[None]:
    """The first signal raises `Interrupted` wherever the block stands; later ones are ignored until its end.

    Main thread only.
    """

    def interrupt(number: int, _frame: FrameType | None) -> None:
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in to_take()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
