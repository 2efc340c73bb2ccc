"""What is written down: the journal, metrics.jsonl and eval.jsonl, and where the run stands.

Owns the run directory's records and the present phase and step. Decides nothing.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from rollplex.journal.events import Durable, Event, PhaseEntered
from rollplex.journal.phases import Phase
from rollplex_coordinator.journal import Journal

FLUSH_PERIOD_S = 0.5


class Record:
    """Journal and metrics of one run. Belongs to the core's thread."""

    def __init__(self, run_dir: Path, journal: Journal) -> None:
        self.journal = journal
        self.phase = Phase.IDLE
        self.step: int | None = None
        self.version = 0
        self.open_groups: tuple[int, ...] = ()
        """Groups of the running step that are not trained yet."""
        self.phase_since_s = time.monotonic()
        self.phase_seconds: dict[Phase, float] = {}
        self._metrics = (run_dir / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        self._evals = (run_dir / "eval.jsonl").open("a", encoding="utf-8", buffering=1)
        self._flushed_s = time.monotonic()

    def append(self, event: Event) -> None:
        """Journal an event; it reaches the disk with the next batch."""
        self.journal.append(event)
        self.tick()

    def tick(self) -> None:
        """Let readers see what has been buffered for half a second."""
        now = time.monotonic()
        if self.journal.buffered and now - self._flushed_s >= FLUSH_PERIOD_S:
            self._flushed_s = now
            self.journal.flush()

    def append_durable(self, event: Durable) -> None:
        """Journal an event and everything before it; on disk when this returns."""
        self.journal.append_durable(event)
        self._flushed_s = time.monotonic()

    def enter(self, phase: Phase) -> None:
        """The node enters a phase; the time since the last entry goes to the phase before it."""
        now = time.monotonic()
        self.phase_seconds[self.phase] = self.phase_seconds.get(self.phase, 0.0) + now - self.phase_since_s
        self.phase, self.phase_since_s = phase, now
        self.append(PhaseEntered(phase=phase.name, start_s=now, step=self.step))

    def metrics(self, row: dict[str, object]) -> None:
        """One line of metrics.jsonl."""
        self._metrics.write(json.dumps(row) + "\n")

    def evaluation(self, row: dict[str, object]) -> None:
        """One line of eval.jsonl."""
        self._evals.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """Flush and close everything."""
        self.journal.close()
        self._metrics.close()
        self._evals.close()
