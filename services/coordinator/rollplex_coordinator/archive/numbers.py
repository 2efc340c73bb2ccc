"""Numbers of a run over its iterations, from metrics.jsonl: chosen columns, thinned where they are many.

Owns how much is read and given. A file that grows while it is read is read as far as it has whole lines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from rollplex.errors import JournalError

METRICS_FILE = "metrics.jsonl"
MAX_BYTES = 1 << 30
"""A larger file is read up to here."""


class Columns(Struct, frozen=True, kw_only=True):
    """`values[name][i]` belongs to iteration `steps[i]`; None: not there, or not finite."""

    steps: list[int]
    values: dict[str, list[float | None]]
    names: list[str]
    """Every number that the newest row has."""
    rows: int
    """Before thinning."""
    stride: int
    """Every so many rows were taken, and the last."""


def read_columns(folder: Path, names: Sequence[str], *, points: int) -> Columns:
    """Columns of a run; empty where it has no numbers yet.

    Args:
        names: of the columns.
        points: at most so many rows, and the last one.

    Raises:
        JournalError: the file cannot be read, or a line of it is not what a run writes.
    """
    path = folder / METRICS_FILE
    if path.is_symlink() or not path.is_file():
        return Columns(steps=[], values={name: [] for name in names}, names=[], rows=0, stride=1)
    try:
        rows = _count(path)
        stride = max(1, math.ceil(rows / points))
        taken = [json.loads(line) for line in _every(path, rows, stride)]
        return Columns(
            steps=[int(row["step"]) for row in taken],
            values={name: [_number(row.get(name)) for row in taken] for name in names},
            names=sorted(name for name, value in taken[-1].items() if _number(value) is not None) if taken else [],
            rows=rows,
            stride=stride,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise JournalError(
            "the numbers of this run cannot be read", got=repr(error)[:200], needed=METRICS_FILE, where=str(path)
        ) from error


def _count(path: Path) -> int:
    """Whole lines."""
    size = lines = 0
    with path.open("rb") as file:
        while size < MAX_BYTES and (part := file.read(1 << 20)):
            size += len(part)
            lines += part.count(b"\n")
    return lines


def _every(path: Path, rows: int, stride: int) -> list[bytes]:
    with path.open("rb") as file:
        return [line for at, line in zip(range(rows), file, strict=False) if at % stride == 0 or at == rows - 1]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value
