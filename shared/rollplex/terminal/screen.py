"""The terminal on which a table is redrawn in place, with lines above it.

No thread: the caller's loop asks `due`, which costs one look at the clock, and shows a new view. Drawing takes at most
one part in `_SHARE` of the time, however slow the terminal is. Lines that are written to `sys.stderr` while the table
is there appear above it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from rollplex.config.environment import read_environment
from rollplex.terminal.view import View

if TYPE_CHECKING:
    from rich.live import Live

EVERY_S = 0.25
_SHARE = 50.0


class Screen:
    """One terminal. Nothing is drawn before the first view, or after `stop`.

    Args:
        stream: of the terminal; see `can_draw`.
        clock: seconds that only go forward.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._live: Live | None = None
        self._stopped = False
        self._next_s = 0.0

    @property
    def drawn(self) -> bool:
        """A table is on the terminal and can be drawn over."""
        return self._live is not None

    def due(self) -> bool:
        """Whether it is time for another view: at most four times a second."""
        return not self._stopped and self._clock() >= self._next_s

    def show(self, view: View) -> None:
        """Draw the table, in place of the one before."""
        if self._stopped:
            return
        from rollplex.terminal.table import render  # noqa: PLC0415 - rich takes a while

        began_s = self._clock()
        if self._live is None:
            self._live = _begin(self._stream)
        self._live.update(render(view), refresh=True)
        self._next_s = began_s + max(EVERY_S, _SHARE * (self._clock() - began_s))

    def stop(self) -> None:
        """Leave the table as it is, give the cursor back; what is written from now on comes below. May be repeated."""
        self._stopped = True
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()


def can_draw(stream: TextIO) -> bool:
    """Whether the stream is a terminal whose lines can be drawn over."""
    return stream.isatty() and read_environment().can_draw


def _begin(stream: TextIO) -> Live:
    from rich.console import Console  # noqa: PLC0415 - rich takes a while
    from rich.live import Live  # noqa: PLC0415

    live = Live(console=Console(file=stream), auto_refresh=False, redirect_stdout=False)
    live.start()
    return live
