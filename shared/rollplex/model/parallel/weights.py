"""A rank's shards out of the weight files of a model folder: what `rollplex.model.weights.fill` is for whole weights.

Owns: reading only the rows and columns that a rank has. Does not know: segments, why a shard is what it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollplex.errors import ModelError
from rollplex.layout.parallel.plan import Parameter
from rollplex.layout.parallel.slices import Slice, slice_of
from rollplex.layout.parallel.split import Range
from rollplex.layout.parameters import ParameterTable
from rollplex.layout.weight_files import placed


def fill_shards(
    table: ParameterTable, parameters: Iterable[Parameter], views: Mapping[str, Tensor], folder: Path
) -> None:
    """Fills one rank's shards; padding becomes 0. Never is more than one shard in memory beside them.

    Args:
        table: of the whole model.
        parameters: of the rank (`DevicePlan.training`).
        views: a tensor for each of them, by its name.
        folder: with model.safetensors, or shards and their index.

    Raises:
        ModelError: see `rollplex.layout.weight_files.placed`.
    """
    wanted: dict[str, list[tuple[Slice, Tensor]]] = {}
    for parameter in parameters:
        cut = slice_of(parameter)
        wanted.setdefault(cut.hf_name, []).append((cut, views[parameter.name]))
    for path, names in placed(table, folder).items():
        try:
            with safe_open(path, framework="pt") as file:
                for name, hf_name in names.items():
                    for cut, view in wanted[hf_name]:
                        view.zero_()
                        if cut.size:
                            part = along(file.get_slice(name), cut.axis, cut.file)
                            view.narrow(cut.axis, 0, cut.size).copy_(part)
        except (SafetensorError, OSError) as error:
            raise ModelError("a weight file cannot be read", got=str(error), where=str(path)) from error


def along(whole: Any, axis: int, taken: Range) -> Tensor:
    """Rows (axis 0) or columns (1) of a tensor, or of one in a safetensors file."""
    where = slice(*taken)
    part: Tensor = whole[:, where] if axis else whole[where]
    return part
