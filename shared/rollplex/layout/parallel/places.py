"""What a device stores of each entry under two layouts, and where a range of it lies.

Owns: which shard is the wider, whether one storage can serve both layouts, offsets and strides. Does not know: what is
copied from whom (`plan`).

    rows                                        columns
    stored   | q: the wider shard | k | v |     stored   [rows, width of the wider shard], row major
    finer    a contiguous range of each         finer    [rows, fewer], with the stored width as row stride
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from rollplex.layout.parallel.degrees import Ranks, RolloutLayout, TrainingLayout
from rollplex.layout.parallel.split import Range, Split
from rollplex.layout.parameters import align

Shards = tuple[Range, ...]
"""Of one entry: what a rank holds of each part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A strided array in the segment of one device."""

    device: int
    """Within the group."""
    offset: int
    """Bytes from the start of the segment."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In numbers, as torch counts them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One contiguous array of a device's segment, row major: ranges of an entry's parts, one after the other."""

    split: Split
    device: int
    shards: Shards
    """Which range of each part."""
    offset: int
    """Bytes; a multiple of 256."""
    item_bytes: int

    @property
    def name(self) -> str:
        """SGLang's name of the entry."""
        return self.split.entry.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.split.local_shape(sum(stop - start for start, stop in self.shards))

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.item_bytes

    def place(self, part: int, wanted: Range) -> Place:
        """Where the range `wanted` of part number `part` lies. It must be within what is stored."""
        start, stop = self.shards[part]
        if not (start <= wanted[0] <= wanted[1] <= stop):
            raise IndexError(f"{self.name}: {wanted} of part {part}, of which {start}:{stop} is stored")
        first = sum(end - begin for begin, end in self.shards[:part]) + wanted[0] - start
        shape = self.split.local_shape(wanted[1] - wanted[0])
        per_step = 1 if self.split.axis == "columns" else prod(shape[1:])
        return Place(
            device=self.device,
            offset=self.offset + first * per_step * self.item_bytes,
            shape=shape,
            strides=contiguous(self.shape),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceStorage:
    """The segment of one device."""

    ranks: Ranks
    shared: tuple[Stored, ...]
    """In the order of the parameter table, one for each entry: what training works on, and rollout where it can."""
    copies: tuple[Stored | None, ...]
    """For each entry: rollout's own copy, where no storage serves both."""
    total_bytes: int


def shards(split: Split, layout: TrainingLayout | RolloutLayout, rank: int) -> Shards:
    """What `rank` holds of each part of an entry."""
    return tuple(layout.shard(split, part, rank) for part in split.parts)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in numbers, of a row-major array."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def obstacle(split: Split, training: TrainingLayout, rollout: RolloutLayout, devices: Iterable[Ranks]) -> str:
    """Why one storage cannot serve both layouts of an entry on some device; empty: it can on all."""
    for ranks in devices:
        trained, sampled = shards(split, training, ranks.training), shards(split, rollout, ranks.rollout)
        for part, mine, other in zip(split.parts, trained, sampled, strict=True):
            if not (_within(mine, other) or _within(other, mine)):
                return (
                    f"padding: device {ranks.device} trains {mine[0]}:{mine[1]} of {part.name} and samples from "
                    f"{other[0]}:{other[1]}; neither contains the other"
                )
        if rollout.one_tensor and not _adjacent(_wider(trained, sampled), sampled):
            return f"{len(split.parts)} row ranges do not make the one tensor that the engine takes"
    return ""


def storage(
    table: Sequence[tuple[Split, str]],
    training: TrainingLayout,
    rollout: RolloutLayout,
    ranks: Ranks,
    *,
    item_bytes: int,
    header_bytes: int,
) -> DeviceStorage:
    """The segment of one device: shared entries in the table's order, then copies, each 256-byte aligned.

    Args:
        table: each entry with its `obstacle`.
        training, rollout: the layouts.
        ranks: of the device.
        item_bytes: of a number.
        header_bytes: in front of the first entry.
    """
    offset = align(header_bytes)
    shared, copies = list[Stored](), list[Stored | None]()

    def put(split: Split, held: Shards) -> Stored:
        nonlocal offset
        stored = Stored(split=split, device=ranks.device, shards=held, offset=offset, item_bytes=item_bytes)
        offset = align(offset + stored.size_bytes)
        return stored

    for split, why in table:
        trained, sampled = shards(split, training, ranks.training), shards(split, rollout, ranks.rollout)
        shared.append(put(split, trained if why else _wider(trained, sampled)))
    for split, why in table:
        copies.append(put(split, shards(split, rollout, ranks.rollout)) if why else None)
    return DeviceStorage(ranks=ranks, shared=tuple(shared), copies=tuple(copies), total_bytes=offset)


def _within(inner: Range, outer: Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _wider(trained: Shards, sampled: Shards) -> Shards:
    """Of each part the shard that contains the other."""
    pairs = zip(trained, sampled, strict=True)
    return tuple(mine if _within(other, mine) else other for mine, other in pairs)


def _adjacent(stored: Shards, held: Shards) -> bool:
    """Whether what is held of the parts lies in one piece in what is stored of them."""
    gaps = [(mine[0] - start, stop - mine[1]) for (start, stop), mine in zip(stored, held, strict=True)]
    return not any(behind or before for (_, behind), (before, _) in pairwise(gaps))
