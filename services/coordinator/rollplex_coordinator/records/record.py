"""What is written down, and where the run stands: journal, metrics.jsonl, eval.jsonl, completions.jsonl, samples,
TensorBoard, other trackers.

Owns the run directory's records and the present phase and step. Decides nothing.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollplex.errors import JournalError
from rollplex.journal.events import Durable, Event, PhaseEntered, StageDone
from rollplex.journal.phases import Phase
from rollplex_coordinator.records.completions import Completion, lines
from rollplex_coordinator.records.journal import Journal
from rollplex_coordinator.records.sample_files import SampleFiles
from rollplex_coordinator.records.sample_summary import markdown
from rollplex_coordinator.records.sample_table import SampleTable
from rollplex_coordinator.records.tensorboard import TensorBoard
from rollplex_coordinator.records.trackers.tracker import Tracker, close_all

FLUSH_PERIOD_S = 0.5
_NO_METRICS = frozenset({"step", "version", "name"})
"""What a row of metrics.jsonl or eval.jsonl says about itself."""


class Record:
    """Journal and metrics of one run. Belongs to the core's thread.

    Args:
        tensorboard: whether the numbers also go to TensorBoard's file.
    """

    def __init__(self, run_dir: Path, journal: Journal, *, tensorboard: bool = True) -> None:
        self.journal = journal
        self.phase = Phase.IDLE
        self.step: int | None = None
        self.version = 0
        self.num_tokens = 0
        """Tokens of prompts and responses in training so far, a prompt counted once for each of its responses."""
        self.open_groups: tuple[int, ...] = ()
        """Groups of the running step that are not trained yet."""
        self.trackers: tuple[Tracker, ...] = ()
        """Other trackers, which get the same numbers from now on."""
        self.phase_since_s = time.monotonic()
        self.phase_seconds: dict[Phase, float] = {}
        self._metrics = _Lines(run_dir / "metrics.jsonl")
        self._evals = _Lines(run_dir / "eval.jsonl")
        self._completions = _Lines(run_dir / "completions.jsonl")
        self._samples = SampleFiles(run_dir)
        self._tensorboard = TensorBoard(run_dir / "tensorboard") if tensorboard else None
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
            if self._tensorboard is not None:
                self._tensorboard.tick()

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

    def stage(self, name: str, start_s: float, end_s: float | None = None) -> None:
        """A part of the start that began at `start_s` (CLOCK_MONOTONIC) is over, now or since `end_s`."""
        self.append(StageDone(name=name, start_s=start_s, end_s=time.monotonic() if end_s is None else end_s))

    def metrics(self, row: Mapping[str, object], completions: Iterable[Completion] = ()) -> None:
        """One line of metrics.jsonl, and what of its responses is kept.

        Raises:
            JournalError: the disk refuses, here and below.
        """
        self._completions.write(lines(completions))
        self._metrics.write(_json_line(row))
        self._scalars(row)

    def evaluation(self, row: Mapping[str, object], completions: Iterable[Completion] = ()) -> None:
        """One line of eval.jsonl, and all its responses; together, so that none is there without its result."""
        self._completions.write(lines(completions))
        self._evals.write(_json_line(row))
        self._scalars(row, evaluation=str(row["name"]))

    def samples(self, table: SampleTable) -> None:
        """A table of samples; written again, it replaces the earlier one. TensorBoard gets it when it is complete."""
        self._samples.write(table)
        if self._tensorboard is None or not table.shown:
            return
        self._tensorboard.text(table.step, "samples", markdown(table))
        for group in table.groups:
            first = next((item for item in group.media if item.png), None)
            if first is not None:
                tag = f"samples/group_{group.group}"
                self._tensorboard.image(table.step, tag, first.png, first.width, first.height)

    def go_on(self, step: int) -> None:
        """A resumed run: the files hold the rows of the steps before `step`, and evaluations up to it."""
        trained = self._metrics.rows()
        self.num_tokens = int(trained[-1].get("num_tokens", 0)) if trained else 0
        if self._tensorboard is not None:
            self._tensorboard.restart(step)
            for row in self._evals.rows():
                if row["step"] == step:  # the restart made it void
                    self._scalars(row, evaluation=str(row["name"]))

    def close(self) -> None:
        """Flush and close everything."""
        self.journal.close()
        for file in (self._metrics, self._evals, self._completions):
            file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        close_all(self.trackers)

    def _scalars(self, row: Mapping[str, object], evaluation: str = "") -> None:
        step = row.get("step", 0)
        assert isinstance(step, int), "every row has its step"
        values = {name: value for name, value in row.items() if name not in _NO_METRICS}
        if self._tensorboard is not None:
            self._tensorboard.scalars(step, values, f"eval/{evaluation}/" if evaluation else "")
        if self.trackers:
            numbers = {name: v for name, v in values.items() if isinstance(v, int | float) and math.isfinite(v)}
            for tracker in self.trackers:
                tracker.put(step, numbers, evaluation)


class _Lines:
    """A file of lines that readers see at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    def write(self, text: bytes) -> None:
        try:
            while text:
                text = text[self._file.write(text) :]
        except OSError as error:
            raise JournalError(
                f"cannot write {self._path.name}",
                got=str(error),
                needed="a writable file and space for it",
                do="Free space on that file system, or make the run directory writable.",
                where=str(self._path),
            ) from error

    def rows(self) -> list[dict[str, Any]]:
        """What the file held when it was opened, and was written since."""
        return [json.loads(line) for line in self._path.read_bytes().splitlines()]

    def close(self) -> None:
        self._file.close()


def _json_line(row: Mapping[str, object]) -> bytes:
    return (json.dumps(row) + "\n").encode()
