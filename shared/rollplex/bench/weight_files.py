"""The weights of two runs after the same update, compared number by number. Needs torch; computes on the host.

Knows folders with safetensors files, as checkpoints are; not what an update is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from rollplex.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor


class WeightsDifference(Struct, frozen=True, kw_only=True):
    """How far the weights of one run are from those of another after the same update."""

    whole: float
    """Norm of the difference, over the norm of what the update changed."""
    largest: float
    """Of one number."""
    unequal: float
    """Part of the numbers that differ."""
    changed: float
    """Part of the numbers that the update changed."""


def weights_difference(before: Path, one: Path, other: Path) -> WeightsDifference:
    """Compare.

    Args:
        before: a model folder, or a checkpoint: what both updates began with.
        one, other: checkpoints after it.

    Raises:
        DataError: the folders hold different tensors, or the update changed nothing.
    """
    files = [_tensors(folder) for folder in (before, one, other)]
    if not files[0].keys() == files[1].keys() == files[2].keys():
        raise DataError("These folders hold different tensors", got=", ".join(map(str, (before, one, other))))
    update = apart = largest = 0.0
    numbers = changed = unequal = 0
    for name in files[1]:
        first, left, right = (_read(held, name) for held in files)
        step, off = left - first, right - left
        update += float(step.square().sum())
        apart += float(off.square().sum())
        largest = max(largest, float(off.abs().max()))
        numbers += left.numel()
        changed += int((step != 0).sum())
        unequal += int((off != 0).sum())
    if not update:
        raise DataError("The update changed no weight, so that there is nothing to compare", where=str(one))
    return WeightsDifference(
        whole=math.sqrt(apart / update), largest=largest, unequal=unequal / numbers, changed=changed / numbers
    )


def _tensors(folder: Path) -> Mapping[str, Path]:
    """The file of each tensor."""
    return {name: file for file in sorted(folder.glob("*.safetensors")) for name in _names(file)}


def _names(file: Path) -> Iterator[str]:
    with _open(file) as held:
        yield from held.keys()


def _read(held: Mapping[str, Path], name: str) -> Tensor:
    with _open(held[name]) as file:
        found: Tensor = file.get_tensor(name)
    return found.double()


def _open(file: Path) -> Any:
    from safetensors import safe_open  # noqa: PLC0415 - imports torch

    return safe_open(file, framework="pt")
