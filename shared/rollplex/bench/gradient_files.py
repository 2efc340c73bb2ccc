"""Two gradients of one model, compared number by number. Needs torch, and computes on the CPU: the next node wants a
GPU for itself, and a process that has once used one keeps a context there until it ends.

A file is an arena as the trainer keeps it (`run.keep_gradients`), laid out by `gradient_table`: alignment gaps and
padding are 0 in both. Sums are in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from msgspec import Struct

from rollplex.errors import DataError
from rollplex.layout.parameters import ParameterTable, Stored

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_NUMBERS = 2**24


class Difference(Struct, frozen=True, kw_only=True):
    """How far one gradient is from another."""

    whole: float
    """Norm of the difference, over the norm of the first; over all parameters."""
    worst: float
    """The greatest such ratio of one parameter."""
    parameter: str
    """Which; SGLang's name."""
    norm: float
    """Of the first."""


def difference(one: Path, other: Path, table: ParameterTable, other_table: ParameterTable | None = None) -> Difference:
    """Compare.

    Args:
        one, other: files of gradients.
        table: of the arena, `rollplex.layout.parameters.gradient_table`.
        other_table: of the other's, if its numbers are of another kind.

    Raises:
        DataError: a file has another size than the table says, or the first gradient is 0 or not finite.
    """
    tables = (table, other_table or table)
    for file, size_bytes in zip((one, other), (each.total_bytes for each in tables), strict=True):
        if file.stat().st_size != size_bytes:
            raise DataError(
                "This is not a gradient of the model",
                got=f"{file.stat().st_size:,} bytes",
                needed=f"{size_bytes:,}",
                where=str(file),
            )
    parts = {
        left.name: _entry((one, left, tables[0].dtype), (other, right, tables[1].dtype))
        for left, right in zip(tables[0].entries, tables[1].entries, strict=True)
    }
    total = math.fsum(square for square, _ in parts.values())
    if not 0.0 < total < math.inf:
        raise DataError("A gradient of this size cannot be compared with", got=f"norm² {total}", where=str(one))
    ratios = {name: _ratio(apart, square) for name, (square, apart) in parts.items()}
    parameter = max(ratios, key=lambda name: ratios[name])
    return Difference(
        whole=math.sqrt(math.fsum(apart for _, apart in parts.values()) / total),
        worst=ratios[parameter],
        parameter=parameter,
        norm=math.sqrt(total),
    )


def _ratio(apart: float, square: float) -> float:
    if apart == 0.0:
        return 0.0
    return math.sqrt(apart / square) if square else math.inf


_Where: TypeAlias = tuple[Path, Stored, str]
"""File, entry and dtype."""


def _entry(one: _Where, other: _Where) -> tuple[float, float]:
    """Sum of squares of the first, and of the difference."""
    square = apart = 0.0
    for left, right in zip(_blocks(*one), _blocks(*other), strict=True):
        square += float(left.square().sum())
        apart += float((left - right).square().sum())
    return square, apart


def _blocks(file: Path, entry: Stored, dtype: str) -> Iterator[Tensor]:
    """The numbers of an entry in float64, at most `BLOCK_NUMBERS` at a time."""
    import torch  # noqa: PLC0415 - nothing else here needs it

    kind: torch.dtype = getattr(torch, dtype)
    size = BLOCK_NUMBERS * kind.itemsize
    with file.open("rb", buffering=0) as stream:
        stream.seek(entry.offset)
        for start in range(0, entry.size_bytes, size):
            content = np.fromfile(stream, dtype=np.uint8, count=min(size, entry.size_bytes - start))
            yield torch.from_numpy(content).view(kind).double()
