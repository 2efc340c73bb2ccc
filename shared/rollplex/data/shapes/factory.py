"""Which shape a dataset has: the one named, or the one whose columns the first row has."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rollplex.data.shapes.base import Shape
from rollplex.data.shapes.easyr1 import EASYR1
from rollplex.data.shapes.llava import LLAVA
from rollplex.data.shapes.ms_swift import MS_SWIFT
from rollplex.data.shapes.trl import TRL
from rollplex.data.shapes.verl import VERL
from rollplex.errors import DataError
from rollplex.protocol.inputs import ShapeName
from rollplex.similar import closest

SHAPES = (TRL, VERL, EASYR1, MS_SWIFT, LLAVA)
COLUMNS = tuple(dict.fromkeys(column for shape in SHAPES for column in shape.columns))
"""Every column that some shape knows."""


def shape_of(columns: Collection[str], name: ShapeName = ShapeName.AUTO) -> Shape:
    """The shape of a dataset.

    Args:
        columns: of its first row, those that hold something.
        name: as the configuration says.

    Raises:
        DataError: none fits, or several do; lists what each needs.
    """
    if name is not ShapeName.AUTO:
        return next(shape for shape in SHAPES if shape.name is name)
    fitting = [shape for shape in SHAPES if set(shape.needs) <= set(columns)]
    fitting = [shape for shape in fitting if not any(set(shape.needs) < set(other.needs) for other in fitting)]
    if len(fitting) == 1:
        return fitting[0]
    what = "The columns fit several shapes" if fitting else "The columns fit no known shape"
    raise DataError(
        what,
        got=f"columns {', '.join(sorted(columns)) or 'none'}",
        needed="; ".join(f"{shape.name}: {', '.join(shape.needs)}" for shape in fitting or SHAPES),
        do="Set data.shape." if fitting else _do(sorted(columns)),
    )


def _do(columns: Sequence[str]) -> str:
    """A column that may be a misspelt one, or how to say which is which."""
    for column in columns:
        for shape in SHAPES:
            if close := closest(column.lower(), [shape.prompt], cutoff=0.7):
                return f'Rename "{column}" to "{close}", or set data.columns: {{{close}: {column}}}.'
    return "Set data.columns, e.g. {prompt: question}, or data.shape."
