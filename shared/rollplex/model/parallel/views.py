"""A rank's parameters as tensors over its device's segment, where a layout plan says that they lie.

Owns: from places of a plan to tensors, and the plan of a rank's gradients. Does not know: segments, modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from torch import Tensor

from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import LayoutPlan, Parameter, plan
from rollplex.layout.parameters import ParameterTable, gradient_table
from rollplex.layout.shape import ModelShape


def shard_views(segment: Tensor, parameters: Iterable[Parameter]) -> dict[str, Tensor]:
    """The training layout's parameters of one device (`DevicePlan.training`) by their parts' names; nothing is copied.

    Args:
        segment: all of the device's segment as one row of numbers of the weights' dtype. Rows of what is split by
            columns may lie further apart than they are long.
    """
    views = dict[str, Tensor]()
    for parameter in parameters:
        place = parameter.view
        if place is None:
            raise AssertionError(f"{parameter.name}: a part of a training shard lies in one piece")
        offset, rest = divmod(place.offset, segment.itemsize)
        if rest or offset + prod(place.shape) > segment.numel():
            raise AssertionError(f"{parameter.name} at byte {place.offset} is not in a segment of {segment.nbytes}")
        views[parameter.name] = segment.as_strided(place.shape, place.strides, segment.storage_offset() + offset)
    return views


def gradient_plan(table: ParameterTable, shape: ModelShape, layout: TrainingLayout, *, dtype: str) -> LayoutPlan:
    """Where gradients lie in each rank's arena: trainable parts alone, shards and nothing else, no header.

    Of two equal layouts no storage is wider than a training shard, so this is the plan in which they are equal.

    Args:
        table: of the weights.
        dtype: of the gradients.

    Raises:
        ConfigError: as `rollplex.layout.parallel.plan.plan`.
    """
    same = RolloutLayout(degree=layout.degree, vision_sharded=layout.vision_sharded)
    return plan(gradient_table(table, dtype=dtype), shape, layout, same)
