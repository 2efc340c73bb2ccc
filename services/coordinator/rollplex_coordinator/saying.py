"""Lines for whoever started the run: on the standard error, and in a file of the run once nobody takes them there.

A terminal that was closed, a pipe whose reader ended and a log on a full disk must not end a run. Decides nothing of
what is said.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

FILE: Final = "terminal.log"
"""In the run's folder of logs, from the moment on when the standard error takes nothing any more."""
_FAILURES: Final = (OSError, ValueError)
"""Of a write: ValueError is that of a stream that was closed."""


class Terminal:
    """The standard error, as long as it takes lines."""

    def __init__(self) -> None:
        self.lost = False
        self._file: Path | None = None
        self._nowhere: TextIO | None = None
        self._kept: list[str] = []

    def say(self, text: str) -> None:
        """One line, or paragraph. Never raises."""
        if not self.lost:
            try:
                sys.stderr.write(text + "\n")
                sys.stderr.flush()
            except _FAILURES as error:
                self.lose(error)
            else:
                return
        self._keep(text)

    def lose(self, error: Exception) -> None:
        """Nothing is written there any more: `error` came of it."""
        if self._nowhere is None:
            self._nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process
        # Python would flush what is left in it at the end of the process, and fail; a library that warns, at once.
        sys.stderr = self._nowhere
        if self.lost:
            return
        self.lost = True
        self._keep(f"rollplex: the standard error takes no more lines ({error}); they go on here")

    def keep_in(self, folder: Path) -> None:
        """Where a file may be made, now that there is a run."""
        self._file = folder / FILE
        kept, self._kept = self._kept, []
        for text in kept:
            self._keep(text)

    def _keep(self, text: str) -> None:
        if self._file is None:
            self._kept.append(text)
            return
        with suppress(OSError):  # then there is nobody left to tell
            self._file.parent.mkdir(exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(text + "\n")


TERMINAL: Final = Terminal()
"""This process's."""


def say(text: str) -> None:
    """One line, or paragraph, on the terminal."""
    TERMINAL.say(text)


def log_to_terminal() -> None:
    """Log lines go to the standard error from now on, above the table where there is one."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", handlers=[_Lines()])


class _Lines(logging.Handler):
    """Asks for `sys.stderr` at each line: a table that is being drawn stands in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))
