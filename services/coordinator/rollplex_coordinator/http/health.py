"""Whether the run can go on, asked of the core and of the journal.

Owns a short memory of the last answer: /healthz needs no token, and must not let a stranger keep the core busy.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from rollplex.errors import JournalError, RollplexError
from rollplex.journal.reader import Reader
from rollplex_coordinator.http.control import Control
from rollplex_coordinator.http.views import HealthPart, HealthView

REMEMBERED_S = 0.5


class Health:
    """Callable from any thread; one asks, the others get its answer."""

    def __init__(self, control: Control, journal_path: Path) -> None:
        self._control = control
        self._journal_path = journal_path
        self._lock = threading.Lock()
        self._answer: HealthView | None = None
        self._until_s = 0.0

    def check(self) -> HealthView:
        """What the run needs, and whether it is there. Never raises for a part that is down."""
        with self._lock:
            if self._answer is None or time.monotonic() >= self._until_s:
                self._answer = HealthView(parts=(*self._core(), self._journal()))
                self._until_s = time.monotonic() + REMEMBERED_S
            return self._answer

    def _core(self) -> tuple[HealthPart, ...]:
        try:
            parts = self._control.health().parts
        except RollplexError as error:
            return (HealthPart(name="core", ok=False, detail=error.what),)
        return (HealthPart(name="core", ok=True), *parts)

    def _journal(self) -> HealthPart:
        try:
            with Reader(self._journal_path) as reader:
                reader.last_id()
        except JournalError as error:
            return HealthPart(name="journal", ok=False, detail=error.what)
        return HealthPart(name="journal", ok=True)
