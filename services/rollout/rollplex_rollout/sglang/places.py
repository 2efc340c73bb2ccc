"""Where the parameters of SGLang's model lie in a segment, for one rank.

Owns: the table of SGLang's names and places, from a parameter table (one rank with all of the model) or from a layout
plan (one of several). Pure: no torch, no SGLang, no mapping.

    one rank        the stored layout is SGLang's own: each entry whole
    several         a range of the wider shard that the device stores (rows, or columns with the stored row stride), or
                    a copy that is rebuilt after each update where no storage serves both layouts
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.places import contiguous
from rollplex.layout.parallel.plan import DevicePlan, Parameter, plan
from rollplex.layout.parameters import ParameterTable
from rollplex.layout.shape import ModelShape
from rollplex.protocol.common import Parallel


@dataclass(frozen=True, kw_only=True, slots=True)
class At:
    """One parameter of SGLang's model as a strided array of the segment."""

    name: str
    """As in SGLang's `named_parameters()`."""
    offset: int
    """Bytes from the start of the segment."""
    shape: tuple[int, ...]
    """Of the rank's tensor, with padding."""
    strides: tuple[int, ...]
    """In numbers, as torch counts them."""
    rebuilt: bool = False
    """Only rollout reads these bytes; else training works on them too."""

    @property
    def span(self) -> int:
        """Numbers from the first one to the last, both included."""
        if not prod(self.shape):
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Every parameter of one rank, in the order of the parameter table."""

    dtype: str
    parameters: tuple[At, ...]
    total_bytes: int
    """Of the segment."""

    @property
    def offsets(self) -> dict[str, int]:
        """By name."""
        return {at.name: at.offset for at in self.parameters}


def places(table: ParameterTable, shape: ModelShape, parallel: Parallel) -> Places:
    """Of the rank that `parallel` names.

    Args:
        table, shape: of the whole model.
        parallel: of the rollout. Its device's segment is planned for an engine that takes each parameter as one tensor
            (`RolloutLayout.one_tensor`), which makes a difference where there are more rollout than training ranks.

    Raises:
        ConfigError: degrees that the model cannot be split by.
    """
    if parallel.training == parallel.rollout == 1:
        return whole(table)
    layouts = TrainingLayout(degree=parallel.training), RolloutLayout(degree=parallel.rollout, one_tensor=True)
    return of_rank(plan(table, shape, *layouts).devices[parallel.device], dtype=table.dtype)


def whole(table: ParameterTable) -> Places:
    """Of an engine that has all of the model."""
    entries = (
        At(name=entry.name, offset=entry.offset, shape=entry.shape, strides=contiguous(entry.shape))
        for entry in table.entries
    )
    return Places(dtype=table.dtype, parameters=tuple(entries), total_bytes=table.total_bytes)


def of_rank(device: DevicePlan, *, dtype: str) -> Places:
    """Of the rollout rank of one device. The plan's rollout layout has `one_tensor`."""
    held = tuple(_at(parameter, device) for parameter in device.rollout)
    return Places(dtype=dtype, parameters=held, total_bytes=device.storage.total_bytes)


def _at(parameter: Parameter, device: DevicePlan) -> At:
    view = parameter.view
    if view is None:
        raise AssertionError(f"{parameter.name} lies in parts: the plan is for an engine that takes them apart")
    return At(
        name=parameter.name,
        offset=view.offset,
        shape=view.shape,
        strides=view.strides,
        rebuilt=parameter.stored in device.storage.copies,
    )
