"""What is copied so that a rollout reads what training has: from which place of which device to which. Pure, no torch.

    of a device that trains     refreshed: into storage that both layouts share; rebuilt: into the rollout's own copy
    of one that only samples    everything is the rollout's own copy: rebuilt

At LOAD all of it, after an update what is trained. Sources are training shards, which no transfer writes: so the order
of transfers, and of devices, changes nothing.

Owns: the list. Does not know: tensors, segments, when it may be carried out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rollplex.layout.parallel.places import Place, Stored
from rollplex.layout.parallel.plan import Alias, DevicePlan, LayoutPlan, Piece, Refresh, owners

Kind: TypeAlias = Literal["refresh", "rebuild"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """One strided array, copied into another of the same shape."""

    kind: Kind
    parameter: str
    """SGLang's name."""
    source: Place
    """`source.device` is that of the training plan."""
    target: Place
    """`target.device` is that of the plan of the device that is written."""
    size_bytes: int


def transfers(device: DevicePlan, *, trained_only: bool) -> tuple[Transfer, ...]:
    """What is copied into the segment of a device of the training plan.

    Args:
        trained_only: after an update; False: at LOAD, frozen weights too.
    """
    return tuple(
        Transfer(
            kind="refresh" if isinstance(piece.holding, Refresh) else "rebuild",
            parameter=parameter.name,
            source=piece.holding.source,
            target=piece.at,
            size_bytes=piece.size_bytes,
        )
        for parameter in device.rollout
        if parameter.trained or not trained_only
        for piece in parameter.pieces
        if not isinstance(piece.holding, Alias)
    )


def target_transfers(training: LayoutPlan, target: DevicePlan, *, trained_only: bool) -> tuple[Transfer, ...]:
    """What is copied into the segment of a device that only samples: all that its rollout rank reads, padding left out.

    Args:
        training: of the devices that train, by its first replica.
        target: of another plan over the same table, with other degrees.
        trained_only: as of `transfers`.
    """
    return tuple(
        transfer
        for entry, parameter in enumerate(target.rollout)
        if parameter.trained or not trained_only
        for piece in parameter.pieces
        for transfer in _from_owners(training, entry, parameter.stored, piece)
    )


def _from_owners(training: LayoutPlan, entry: int, stored: Stored, piece: Piece) -> Iterator[Transfer]:
    split = stored.split
    number = [part.name for part in split.parts].index(piece.part)
    replicas = len(training.devices) // training.training.degree
    for taken, owner in owners(training.training, split, split.parts[number], piece.of, own=0):
        if owner is None:
            continue
        source = training.devices[owner * replicas].storage.shared[entry].place(number, taken)
        yield Transfer(
            kind="rebuild",
            parameter=stored.name,
            source=source,
            target=stored.place(number, taken),
            size_bytes=split.numbers(taken[1] - taken[0]) * stored.item_bytes,
        )
