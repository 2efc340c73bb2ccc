"""A rank's parameters as tensors over its device's segment, where a layout plan says that they lie.

Owns: from places of a plan to tensors. Does not know: segments, modules, why something lies where.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from torch import Tensor

from rollplex.layout.parallel.places import Place
from rollplex.layout.parallel.plan import Parameter


def shard_views(segment: Tensor, parameters: Iterable[Parameter]) -> dict[str, Tensor]:
    """Parameters of one device by their parts' names; nothing is copied.

    Args:
        segment: all of the device's segment as one row of numbers of the weights' dtype. Rows of what is split by
            columns may lie further apart than they are long.
        parameters: of the training layout (`DevicePlan.training`), or `rollplex.layout.parallel.parts.rollout_parts`.
    """
    views = dict[str, Tensor]()
    for parameter in parameters:
        place = parameter.view
        if place is None:
            raise AssertionError(f"{parameter.name}: a part of a rank's shard lies in one piece")
        views[parameter.name] = place_view(segment, place, parameter.name)
    return views


def place_view(segment: Tensor, place: Place, name: str) -> Tensor:
    """The array at a place of a device's segment, given as `shard_views` takes it. name: for the error."""
    offset, rest = divmod(place.offset, segment.itemsize)
    if rest or offset + prod(place.shape) > segment.numel():
        raise AssertionError(f"{name} at byte {place.offset} is not in a segment of {segment.nbytes}")
    return segment.as_strided(place.shape, place.strides, segment.storage_offset() + offset)
