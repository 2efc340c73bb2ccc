"""SIGINT, SIGTERM and SIGHUP while nothing has been started yet, and across the start of another program.

    rollplex            end_quietly()         a signal ends it: 130 or 0, no traceback, during imports too
      │ hold_back()                           a signal waits
      ▼ exec or fork+exec                     the mask is inherited, what waits is kept by exec
    coordinator         takes them over (or end_quietly()), then let_through()

Imports nothing that takes time, `typing` neither: it runs before anything slow. Knows nothing of runs.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from rollplex.stop_signals import EXIT_INTERRUPTED, STOP_SIGNALS, to_take


def end_quietly() -> None:
    """From now on SIGINT ends this process with 130, SIGTERM and SIGHUP with 0, at once and without a word; but SIGHUP
    stays ignored if it is (nohup).

    For the time before anything is started that would need an orderly end. Main thread only.
    """
    for number in to_take():
        signal.signal(number, _end)
    let_through()


def hold_back() -> None:
    """Signals wait (blocked in this thread) until `let_through`, in a program started meanwhile too."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def let_through() -> None:
    """Undo `hold_back`, by whichever process it was called; signals that waited are delivered now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else 0)
