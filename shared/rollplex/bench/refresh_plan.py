"""What is copied after an update under a placement, and which collectives would bring the same pieces. Pure, no torch.

Owns: who writes which device's segment, from whose; pieces in one row a source. Does not know: tensors, time.

    all-gather    devices that read from each other and give as many bytes each
    broadcast     otherwise: one for each device that others read from
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rollplex.bench.placement import Placement
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.places import Place
from rollplex.layout.parallel.plan import DevicePlan, LayoutPlan, plan
from rollplex.layout.parallel.transfers import Transfer, target_transfers, transfers
from rollplex.layout.parameters import ParameterTable
from rollplex.layout.shape import ModelShape

Kind: TypeAlias = Literal["all-gather", "broadcast"]


@dataclass(frozen=True, kw_only=True)
class DeviceCopies:
    """One device's segment and what is copied into it after an update."""

    device: int
    plan: DevicePlan
    training: LayoutPlan
    """Of the devices that the pieces come from."""
    sources: tuple[int, ...]
    """Those devices: `Transfer.source.device` counts among them."""
    writer: int
    """The device whose trainer copies."""
    trains: bool
    transfers: tuple[Transfer, ...]

    def source(self, transfer: Transfer) -> int:
        """The device that a piece comes from."""
        return self.sources[transfer.source.device]

    @property
    def remote(self) -> tuple[Transfer, ...]:
        """The pieces that come from another device."""
        return tuple(each for each in self.transfers if self.source(each) != self.device)

    @property
    def copied_bytes(self) -> int:
        return sum(each.size_bytes for each in self.transfers)

    @property
    def remote_bytes(self) -> int:
        return sum(each.size_bytes for each in self.remote)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Pieces of one device that others read, one after the other."""

    pieces: tuple[tuple[str, Place], ...]
    """Parameter and place in the device's segment; each once."""
    offsets: tuple[int, ...]
    """Bytes."""
    size_bytes: int

    def offset(self, transfer: Transfer) -> int:
        """Where a transfer's source lies in the row."""
        return self.offsets[self.pieces.index((transfer.parameter, transfer.source))]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One that brings pieces from one or all of its members to the others."""

    kind: Kind
    members: tuple[int, ...]
    sources: tuple[int, ...]
    """All members, or one."""


def device_copies(placement: Placement, table: ParameterTable, shape: ModelShape) -> tuple[DeviceCopies, ...]:
    """Of every device, as the trainers of a run do it (`rollplex_trainer.transfer`).

    Raises:
        ConfigError: degrees that the model cannot be split by.
    """
    training = TrainingLayout(degree=placement.training)
    rollout = RolloutLayout(degree=placement.training if placement.apart else placement.rollout)
    whole = plan(table, shape, training, rollout)
    size = len(whole.devices)
    made = []
    for device in range(placement.training_devices):
        first = device - device % size
        own = whole.devices[device % size]
        made.append(
            DeviceCopies(
                device=device,
                plan=own,
                training=whole,
                sources=tuple(range(first, first + size)),
                writer=device,
                trains=True,
                transfers=transfers(own, trained_only=True),
            )
        )
    if placement.apart:
        made += _targets(placement, table, shape, whole)
    return tuple(made)


def _targets(
    placement: Placement, table: ParameterTable, shape: ModelShape, training: LayoutPlan
) -> Iterable[DeviceCopies]:
    degree = placement.rollout
    whole = plan(table, shape, TrainingLayout(degree=degree), RolloutLayout(degree=degree))
    for number in range(placement.rollout_devices):
        target = whole.devices[number % degree]
        yield DeviceCopies(
            device=placement.training_devices + number,
            plan=target,
            training=training,
            sources=tuple(range(placement.training)),
            writer=number % placement.training,
            trains=False,
            transfers=target_transfers(training, target, trained_only=True),
        )


def rows(copies: Sequence[DeviceCopies]) -> dict[int, Row]:
    """By device that others read from."""
    pieces: dict[int, dict[tuple[str, Place], int]] = {}
    for each in copies:
        for transfer in each.remote:
            found = pieces.setdefault(each.source(transfer), {})
            found[transfer.parameter, transfer.source] = transfer.size_bytes
    return {device: _row(found) for device, found in sorted(pieces.items())}


def _row(sizes: dict[tuple[str, Place], int]) -> Row:
    offsets, end = [], 0
    for size_bytes in sizes.values():
        offsets.append(end)
        end += size_bytes
    return Row(pieces=tuple(sizes), offsets=tuple(offsets), size_bytes=end)


def collectives(copies: Sequence[DeviceCopies]) -> tuple[Collective, ...]:
    """Which bring every device what it reads of others; the same list on all."""
    given = rows(copies)
    readers: dict[int, set[int]] = {source: set() for source in given}
    for each in copies:
        for transfer in each.remote:
            readers[each.source(transfer)].add(each.device)
    made: list[Collective] = []
    left = set(readers)
    while left:
        group = _connected(min(left), readers)
        sources = sorted(group & set(readers))
        left -= group
        if sources == sorted(group) and len({given[source].size_bytes for source in sources}) == 1:
            made.append(Collective(kind="all-gather", members=tuple(sources), sources=tuple(sources)))
            continue
        made += [
            Collective(kind="broadcast", members=tuple(sorted({source, *readers[source]})), sources=(source,))
            for source in sources
        ]
    return tuple(made)


def _connected(start: int, readers: dict[int, set[int]]) -> set[int]:
    """Devices that give to, or read from, each other."""
    found, todo = set[int](), [start]
    while todo:
        device = todo.pop()
        if device in found:
            continue
        found.add(device)
        todo += readers.get(device, ())
        todo += [source for source, read_by in readers.items() if device in read_by]
    return found
