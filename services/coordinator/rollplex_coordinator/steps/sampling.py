"""Tables of samples: asks the input child what rows look like, and writes a table once a step is done.

    begin of a step ─► ShowRows ─┄┄┄┄► RowsShown, whenever it comes
    end of the step ─► table with what is known; again, if the rest comes later

Owns which steps have a table, and the two halves of one until they meet. Nobody waits for pictures.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollplex.config.checks import TRAIN
from rollplex.config.job import RunSection
from rollplex.protocol.common import Role
from rollplex.protocol.inputs import RowShown, RowsShown, ShowRows
from rollplex_coordinator.processes.hub import Peer
from rollplex_coordinator.processes.link import Link
from rollplex_coordinator.records.record import Record
from rollplex_coordinator.records.sample_table import SampleTable, with_rows


class Samples:
    """Of the training steps of one run.

    Args:
        unit_s: deadline of an answer, from any progress on.
    """

    def __init__(self, link: Link, record: Record, run: RunSection, unit_s: float) -> None:
        self._link = link
        self._record = record
        self._run = run
        self._unit_s = unit_s
        self._rows: dict[int, tuple[RowShown, ...]] = {}
        self._tables: dict[int, SampleTable] = {}
        self._asked: int | None = None
        link.on(RowsShown, self._on_shown)

    def wanted(self, step: int) -> int:
        """Groups of the table of this step; 0: it has none."""
        return self._run.sampled(step)

    def ask(self, step: int, rows: Sequence[int]) -> None:
        """A step begins with these rows, or begins again."""
        wanted = tuple(rows[: self.wanted(step)])
        if wanted and step != self._asked:
            self._asked = step
            self._link.ask(
                Role.INPUT,
                lambda cause: ShowRows(cause=cause, step=step, source=TRAIN, rows=wanted),
                f"show {len(wanted)} rows of step {step}",
                self._unit_s,
            )

    def write(self, table: SampleTable) -> None:
        """A step with a table is done."""
        rows = self._rows.pop(table.step, None)
        if rows is None:
            self._tables[table.step] = table
            self._record.samples(table)
        else:
            self._record.samples(with_rows(table, rows))

    def _on_shown(self, _peer: Peer, message: RowsShown) -> None:
        table = self._tables.pop(message.step, None)
        if table is None:
            self._rows[message.step] = message.rows
        else:
            self._record.samples(with_rows(table, message.rows))
