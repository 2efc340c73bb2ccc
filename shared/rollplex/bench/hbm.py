"""The memory of GPUs against the books, phase by phase and over the iterations of one run, from its journal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

from msgspec import Struct

from rollplex.bench.tables import Table
from rollplex.errors import DataError
from rollplex.journal.events import DeviceReady, LeaseGranted, MemoryObserved
from rollplex.journal.reader import Reader
from rollplex.protocol.common import Device, Kind

STANDING: Final = (Kind.ACTOR_WEIGHTS, Kind.REFERENCE_WEIGHTS, Kind.GRADIENTS, Kind.OPTIMIZER_STATE)
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
    """Of one device of a run."""

    device: Device
    gpu: str
    total_bytes: int
    overhead_bytes: int
    phases: tuple[PhasePeaks, ...]
    standing_bytes: dict[str, int] = {}
    """Segments that were there from LOAD on, by kind."""

    @property
    def within(self) -> bool:
        """Whether every phase is explained and none has grown, within `LIMIT` of the device."""
        limit = LIMIT * self.total_bytes
        return all(
            abs(one.difference_bytes) <= limit and one.last_bytes - one.first_bytes <= limit for one in self.phases
        )


def read_hbm(run_dir: Path, *, warmup: int) -> tuple[Hbm, ...]:
    """What a run's journal says, device by device.

    Args:
        warmup: so many first iterations do not count.

    Raises:
        DataError: the run used no GPU, or has no iteration that counts.
        JournalError: the journal cannot be read.
    """
    with Reader(run_dir / "journal.sqlite") as reader:
        devices = [cast("DeviceReady", record.event) for record in reader.events_of_type(DeviceReady)]
        observed = [cast("MemoryObserved", record.event) for record in reader.events_of_type(MemoryObserved)]
        leases = [cast("LeaseGranted", record.event) for record in reader.events_of_type(LeaseGranted)]
    counted = [one for one in observed if one.step is not None and one.step >= warmup]
    if not devices or not counted:
        raise DataError(
            "The memory of a GPU was not observed",
            got=f"{len(devices)} GPUs, {len(counted)} phases of iterations that count",
            needed="a run with device.kind: cuda and more iterations than --warmup",
            where=str(run_dir / "journal.sqlite"),
        )
    last = {ready.device: ready for ready in devices}
    return tuple(
        _device(
            ready,
            [one for one in counted if one.device == device],
            [one for one in leases if one.device == device],
        )
        for device, ready in sorted(last.items())
        if any(one.device == device for one in counted)
    )


def _device(ready: DeviceReady, counted: Sequence[MemoryObserved], leases: Sequence[LeaseGranted]) -> Hbm:
    phases = list(dict.fromkeys(one.phase for one in counted))
    standing: dict[int, LeaseGranted] = {lease.lease: lease for lease in leases if lease.kind in STANDING}
    held: dict[str, int] = {}
    for lease in standing.values():
        held[str(lease.kind)] = held.get(str(lease.kind), 0) + lease.size_bytes
    return Hbm(
        device=ready.device,
        gpu=ready.name,
        total_bytes=ready.total_bytes,
        overhead_bytes=counted[-1].overhead_bytes or 0,
        phases=tuple(_phase(phase, [one for one in counted if one.phase == phase]) for phase in phases),
        standing_bytes=held,
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
