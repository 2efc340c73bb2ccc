"""How one storage serves the training and the rollout layout: every piece of every parameter of every device.

Owns: which pieces are aliased, refreshed or rebuilt, and from where. Does not know: tensors, copying, processes.

    alias      the bytes that this device's trainer writes, or padding, which stays zero: nothing to do after an update
    refresh    in the shared storage of this device, but another training rank's: copied from its device
    rebuild    no storage serves both layouts: rollout's own copy, made again from the training shards

Every parameter of the training layout is one alias: training never waits for another device's weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from rollplex.layout.parallel.degrees import Ranks, RolloutLayout, TrainingLayout, group
from rollplex.layout.parallel.places import DeviceStorage, Place, Stored, obstacle, storage
from rollplex.layout.parallel.refusals import check
from rollplex.layout.parallel.split import Part, Range, Split, splits
from rollplex.layout.parameters import ParameterTable
from rollplex.layout.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Alias:
    """Nothing is copied."""


@dataclass(frozen=True, slots=True)
class Refresh:
    """Copied after each update into the shared storage."""

    source: Place
    """Of another device, in the same shape."""


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Copied after each update into a copy that only rollout reads."""

    source: Place
    """Of this device or another, in the same shape."""
    why: str


Holding: TypeAlias = Alias | Refresh | Rebuild


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A range of one rank's parameter: of rows or columns, or all of it."""

    part: str
    """Name of the part (`split.Part`)."""
    of: Range
    """Along the axis of the whole part."""
    to: Range
    """Along the axis of the rank's parameter."""
    at: Place
    """In the segment of the rank's own device."""
    holding: Holding
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter of one rank in one of the layouts."""

    name: str
    """A part's name in the training layout, SGLang's in the rollout layout."""
    shape: tuple[int, ...]
    """Of the rank's shard."""
    size_bytes: int
    pieces: tuple[Piece, ...]
    """In the order of `to`, without gaps."""
    trained: bool
    """False: frozen, so that what is not aliased is copied once, at LOAD."""
    stored: Stored
    """Where it lies: shared storage or copy."""

    @property
    def view(self) -> Place | None:
        """The one strided array that it is; None: the parts of a fused parameter lie apart (`pieces`)."""
        first = self.pieces[0].at
        offset = first.offset
        for piece in self.pieces:
            if piece.at.offset != offset:
                return None
            step = 1 if self.stored.split.axis == "columns" else prod(piece.at.shape[1:])
            offset += (piece.to[1] - piece.to[0]) * step * self.stored.item_bytes
        return Place(device=first.device, offset=first.offset, shape=self.shape, strides=first.strides)


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlan:
    """One device of the group."""

    storage: DeviceStorage
    training: tuple[Parameter, ...]
    rollout: tuple[Parameter, ...]

    @property
    def ranks(self) -> Ranks:
        return self.storage.ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutPlan:
    """All devices of one group; further groups are the same."""

    training: TrainingLayout
    rollout: RolloutLayout
    item_bytes: int
    devices: tuple[DevicePlan, ...]


def plan(
    table: ParameterTable,
    shape: ModelShape,
    training: TrainingLayout,
    rollout: RolloutLayout,
    *,
    devices: int | None = None,
) -> LayoutPlan:
    """The plan of one group of devices. With degrees of 1 the storage is `table`'s own, byte for byte.

    Args:
        table: of the whole model (`parameter_table`), whose dtype and header every device's segment has.
        shape: of the model.
        training: the layout that the trainer and the prefix processes work on.
        rollout: the engine's.
        devices: that there are; the group's own number unless given.

    Raises:
        ConfigError: degrees that do not nest, that the devices do not hold, or that the model cannot be split by.
    """
    larger = max(training.degree, rollout.degree)
    check(shape, training, rollout, devices=larger if devices is None else devices)
    members = group(training, rollout)
    entries = [(split, obstacle(split, training, rollout, members)) for split in splits(table, shape)]
    stores = [
        storage(entries, training, rollout, ranks, item_bytes=table.item_bytes, header_bytes=table.header_bytes)
        for ranks in members
    ]
    planner = _Planner(training, rollout, stores)
    plans = (
        DevicePlan(
            storage=store,
            training=tuple(p for n in range(len(entries)) for p in planner.trained(store, n)),
            rollout=tuple(planner.sampled(store, n, why) for n, (_, why) in enumerate(entries)),
        )
        for store in stores
    )
    return LayoutPlan(training=training, rollout=rollout, item_bytes=table.item_bytes, devices=tuple(plans))


def owners(
    training: TrainingLayout, split: Split, part: Part, wanted: Range, *, own: int
) -> Iterator[tuple[Range, int | None]]:
    """Cut `wanted` where its owner in training changes: (range, training rank or None for padding).

    Rank `own` comes first: where every rank has all of a part, nothing is to be copied from another.
    """
    ranks = [own, *(rank for rank in range(training.degree) if rank != own)]
    held = [(training.shard(split, part, rank), rank) for rank in ranks]
    position, end = wanted
    while position < end:
        owner = next(((stop, rank) for (start, stop), rank in held if start <= position < stop), None)
        stop, rank = owner or (end, None)
        yield (position, min(stop, end)), rank
        position = stop


class _Planner:
    """Makes the parameters of each device, knowing the storage of all."""

    def __init__(self, training: TrainingLayout, rollout: RolloutLayout, stores: Sequence[DeviceStorage]) -> None:
        self._training = training
        self._rollout = rollout
        self._stores = stores
        self._replicas = len(stores) // training.degree

    def trained(self, store: DeviceStorage, entry: int) -> Iterator[Parameter]:
        """The training layout's parameters of one entry: its parts."""
        stored = store.shared[entry]
        for number, part in enumerate(stored.split.parts):
            held = self._training.shard(stored.split, part, store.ranks.training)
            yield _parameter(part.name, stored, [_piece(stored, number, held, 0, Alias())])

    def sampled(self, store: DeviceStorage, entry: int, why: str) -> Parameter:
        """The rollout layout's parameter of one entry."""
        stored = store.copies[entry] or store.shared[entry]
        split = stored.split
        pieces = list[Piece]()
        for number, part in enumerate(split.parts):
            wanted = self._rollout.shard(split, part, store.ranks.rollout)
            for taken, owner in owners(self._training, split, part, wanted, own=store.ranks.training):
                to = pieces[-1].to[1] if pieces else 0
                source = self._source(store.ranks, owner, entry, number, taken)
                pieces.append(_piece(stored, number, taken, to, _holding(source, store.ranks.device, why)))
        return _parameter(split.entry.name, stored, pieces)

    def _source(self, ranks: Ranks, owner: int | None, entry: int, part: int, taken: Range) -> Place | None:
        """Where training rank `owner` has the range: on this device, or in the replica of the same number."""
        if owner is None:
            return None
        return self._stores[owner * self._replicas + ranks.replica].shared[entry].place(part, taken)


def _holding(source: Place | None, device: int, why: str) -> Holding:
    if source is None:
        return Alias()
    if why:
        return Rebuild(source, why)
    return Alias() if source.device == device else Refresh(source)


def _piece(stored: Stored, part: int, of: Range, to: int, holding: Holding) -> Piece:
    size = of[1] - of[0]
    return Piece(
        part=stored.split.parts[part].name,
        of=of,
        to=(to, to + size),
        at=stored.place(part, of),
        holding=holding,
        size_bytes=stored.split.numbers(size) * stored.item_bytes,
    )


def _parameter(name: str, stored: Stored, pieces: Sequence[Piece]) -> Parameter:
    shape = stored.split.local_shape(pieces[-1].to[1])
    return Parameter(
        name=name,
        shape=shape,
        size_bytes=prod(shape) * stored.item_bytes,
        pieces=tuple(pieces),
        trained=stored.split.entry.trainable,
        stored=stored,
    )
