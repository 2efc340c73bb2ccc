"""A rollout rank's weights, fused ones in parts, as the passes of `rollplex.model.parallel` take them. Pure, no torch.

Owns: joining the pieces of a part. Does not know: what is copied, tensors.
"""

from __future__ import annotations

from itertools import groupby
from math import prod

from rollplex.layout.parallel.plan import Alias, DevicePlan, Parameter, Piece


def rollout_parts(device: DevicePlan) -> tuple[Parameter, ...]:
    """What the rollout rank of a device samples from: as `DevicePlan.training`, but of the rollout's degree.

    Names are those of parts. Each is one piece, in the storage that training shares or in the rollout's own copy, with
    nothing to be copied: that is said by `DevicePlan.rollout`, and done by the trainer (`transfers`).
    """
    return tuple(_part(parameter, pieces) for parameter in device.rollout for pieces in _by_part(parameter))


def _by_part(parameter: Parameter) -> list[list[Piece]]:
    return [list(pieces) for _, pieces in groupby(parameter.pieces, lambda piece: piece.part)]


def _part(parameter: Parameter, pieces: list[Piece]) -> Parameter:
    stored, name = parameter.stored, pieces[0].part
    number = [part.name for part in stored.split.parts].index(name)
    of = (pieces[0].of[0], pieces[-1].of[1])
    at = stored.place(number, of)
    size_bytes = prod(at.shape) * stored.item_bytes
    piece = Piece(part=name, of=of, to=(0, of[1] - of[0]), at=at, holding=Alias(), size_bytes=size_bytes)
    return Parameter(
        name=name, shape=at.shape, size_bytes=size_bytes, pieces=(piece,), trained=parameter.trained, stored=stored
    )
