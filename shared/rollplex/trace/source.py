"""A run's journal, opened to be told: which iterations there are, and their chapters.

Owns the way from the file to chapters. Reads in pieces; a journal that is being written to is told as far as it is on
disk. A journal may hold several starts of one run; CLOCK_MONOTONIC has one meaning only while the host is up, so that
what lies before the host's last boot is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from rollplex.errors import ConfigError, JournalError
from rollplex.journal.events import IterationStarted, Record, RunStarted
from rollplex.journal.reader import Reader, Row
from rollplex.trace.chapters import BACKGROUND, LEASES, Narrator
from rollplex.trace.marks import Chapter
from rollplex.trace.steps import Steps, span

_ROWS = 2_000
_BYTES = 4 * 2**20
_MAX_STEPS = 2**31


class Source:
    """One journal.

    Args:
        journal: its file.

    Raises:
        JournalError: there is none, it is empty, or it cannot be read.
    """

    def __init__(self, journal: Path) -> None:
        if not journal.is_file() or journal.stat().st_size == 0:
            found = "an empty file" if journal.is_file() else "no file"
            raise JournalError("this run has no journal", got=found, needed="journal.sqlite", where=str(journal))
        self._reader = Reader(journal)
        try:
            first = self._reader.rows_after(0, 1)
            if not first:
                raise JournalError(
                    "the journal has no event yet", do="Wait until the run has started.", where=str(journal)
                )
            starts = [r for r in self._reader.events_of_type(RunStarted) if isinstance(r.event, RunStarted)]
            self._after = _last_boot(starts) - 1
            self.run: RunStarted | None = _run(starts[-1]) if starts else None
            self.first: Row = self._reader.rows_after(self._after, 1)[0]
            """The first event that can be told; its two times say how the clocks stand to each other."""
            self._last = self._reader.last_id()
            self.steps = self._started()
            """Iterations that were started, in order."""
        except BaseException:
            self._reader.close()
            raise

    @property
    def left_out(self) -> int:
        """Events from before the host's last boot, which no clock places."""
        return self._after

    def require(self, steps: Steps) -> list[int]:
        """Those of the iterations that there are.

        Raises:
            ConfigError: none of them was started.
        """
        found = [step for step in self.steps if step in steps]
        if not found and (self.steps or steps.first > 0):
            raise ConfigError(
                "This run has none of these iterations", got=str(steps), needed=span(self.steps), where="--steps"
            )
        return found

    def chapters(self, steps: Steps, *, memory: bool = True) -> Iterator[Chapter]:
        """The chapters of a range; with the one before the first iteration where the range begins at 0.

        Args:
            memory: whether leases are told.
        """
        narrator = Narrator()
        inside = steps.first == 0
        if inside:
            narrator.begin(self.first.monotonic_s)
        for row in self._rows():
            if row.type == "IterationStarted" and inside != (wanted := row.step is not None and row.step in steps):
                inside = wanted
                if inside:
                    narrator.begin(row.monotonic_s)
                else:
                    yield from narrator.end(row.monotonic_s)
            if inside and (memory or row.type not in LEASES):
                yield from narrator.tell(row.record())
            elif not inside and row.type in BACKGROUND:
                narrator.skip(row.record())
        if inside:
            yield from narrator.end()

    def _started(self) -> list[int]:
        if not self._after:
            return self._reader.steps(0, _MAX_STEPS)
        found = [r for r in self._reader.events_of_type(IterationStarted) if r.id > self._after]
        return sorted({record.step for record in found if record.step is not None})

    def _rows(self) -> Iterator[Row]:
        """As far as the journal went when it was opened: a run that goes on is not run after."""
        after = self._after
        while after < self._last and (rows := self._reader.rows_after(after, _ROWS, _BYTES)):
            yield from (row for row in rows if row.id <= self._last)
            after = rows[-1].id

    def records(self) -> Iterator[Record]:
        """All of it that can be told, event by event."""
        for row in self._rows():
            yield row.record()

    def close(self) -> None:
        """End the connection."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _run(record: Record) -> RunStarted:
    assert isinstance(record.event, RunStarted), "events_of_type gives that type"
    return record.event


def _last_boot(starts: list[Record]) -> int:
    """Id of the first start since the host was last booted; 1 where nothing was started before a boot."""
    boots = [_run(record).boot_id for record in starts]
    if len(set(boots)) < 2:
        return 1
    first = len(boots) - 1
    while boots[first - 1] == boots[-1]:
        first -= 1
    return starts[first].id
