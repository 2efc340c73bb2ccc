"""SIGTERM as a worker hears it: at once, whatever its main thread does.

    kernel ── SIGTERM ──► interpreter, in the signal itself ── a byte ──► thread `terms` ── on_term()
                              └── the handler, when the main thread next runs Python ──────┘ whichever is first

Python runs a handler in the main thread only, between two of its instructions: later than any grace time while that
thread computes or waits in C, and not at all if the signal comes just before it falls asleep there. Hence the thread.
The handler is for a service whose libraries take the interpreter's descriptor for themselves, as asyncio's loops do.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


class Terms:
    """From its making on, SIGTERM no longer ends the process. Made in the main thread, once."""

    def __init__(self) -> None:
        self.came = False
        self._told = False
        self._on_term: Callable[[], None] | None = None
        self._heard, written = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(written, False)  # as the interpreter needs it
        # As process 1 of a container a process gets no signal that it does not handle.
        signal.signal(signal.SIGTERM, self._handle)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)

    def obey(self, on_term: Callable[[], None]) -> None:
        """Call `on_term` at the first SIGTERM, soon if it has come: from some thread, in rare cases from two."""
        self._on_term = on_term
        threading.Thread(target=self._hear, name="terms", daemon=True).start()

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.came = True
        self._tell()

    def _hear(self) -> None:
        while numbers := os.read(self._heard, 4096):  # without deadline on purpose: it is what this thread is for
            if signal.SIGTERM in numbers:
                self.came = True
                self._tell()

    def _tell(self) -> None:
        if self._on_term is not None and not self._told:
            self._told = True
            self._on_term()
