"""The memory of a GPU against the books, phase by phase and over the iterations of one run, from its journal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

from msgspec import Struct

from rollplex.bench.tables import Table
from rollplex.errors import DataError
from rollplex.journal.events import DeviceReady, MemoryObserved
from rollplex.journal.reader import Reader

LIMIT: Final = 0.02
"""Of the device: so much may be held that leases and overhead do not explain, and so much may a peak grow."""


class PhasePeaks(Struct, frozen=True, kw_only=True):
    """Of one phase, over the iterations."""

    phase: str
    first_bytes: int
    """Its peak in the first iteration that counts."""
    last_bytes: int
    most_bytes: int
    books_bytes: int
    """Leases and overhead at the greatest peak."""
    difference_bytes: int
    """The largest difference of an iteration; negative: less was held than leased."""
    iterations: int


class Hbm(Struct, frozen=True, kw_only=True):
    """Of one run."""

    gpu: str
    total_bytes: int
    overhead_bytes: int
    phases: tuple[PhasePeaks, ...]

    @property
    def within(self) -> bool:
        """Whether every phase is explained and none has grown, within `LIMIT` of the device."""
        limit = LIMIT * self.total_bytes
        return all(
            abs(one.difference_bytes) <= limit and one.last_bytes - one.first_bytes <= limit for one in self.phases
        )


def read_hbm(run_dir: Path, *, warmup: int) -> Hbm:
    """What a run's journal says.

    Args:
        warmup: so many first iterations do not count.

    Raises:
        DataError: the run used no GPU, or has no iteration that counts.
        JournalError: the journal cannot be read.
    """
    with Reader(run_dir / "journal.sqlite") as reader:
        devices = [cast("DeviceReady", record.event) for record in reader.events_of_type(DeviceReady)]
        observed = [cast("MemoryObserved", record.event) for record in reader.events_of_type(MemoryObserved)]
    counted = [one for one in observed if one.step is not None and one.step >= warmup]
    if not devices or not counted:
        raise DataError(
            "The memory of a GPU was not observed",
            got=f"{len(devices)} GPUs, {len(counted)} phases of iterations that count",
            needed="a run with device.kind: cuda and more iterations than --warmup",
            where=str(run_dir / "journal.sqlite"),
        )
    phases = list(dict.fromkeys(one.phase for one in counted))
    return Hbm(
        gpu=devices[-1].name,
        total_bytes=devices[-1].total_bytes,
        overhead_bytes=counted[-1].overhead_bytes or 0,
        phases=tuple(_phase(phase, [one for one in counted if one.phase == phase]) for phase in phases),
    )


def table(hbm: Hbm) -> Table:
    """One line a phase."""
    rows = tuple(
        (
            one.phase,
            str(one.iterations),
            *(_gib(size) for size in (one.first_bytes, one.last_bytes, one.most_bytes, one.books_bytes)),
            _gib(one.difference_bytes),
            f"{one.difference_bytes / hbm.total_bytes:.2%}",
        )
        for one in hbm.phases
    )
    head = ("GiB", "iterations", "first peak", "last peak", "highest", "leases + overhead", "largest difference")
    return Table(head=(*head, "of the device"), rows=rows)


def _phase(phase: str, observed: Sequence[MemoryObserved]) -> PhasePeaks:
    steps: dict[int, int] = {}
    for one in observed:
        step = one.step or 0
        steps[step] = max(one.used_bytes, steps.get(step, 0))
    top = max(observed, key=lambda one: one.used_bytes)
    return PhasePeaks(
        phase=phase,
        first_bytes=steps[min(steps)],
        last_bytes=steps[max(steps)],
        most_bytes=top.used_bytes,
        books_bytes=top.used_bytes - top.difference_bytes,
        difference_bytes=max((one.difference_bytes for one in observed), key=abs),
        iterations=len(steps),
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
