"""Whole tensors out of the shards of all ranks, one at a time, in host memory: for files that do not depend on degrees.

Owns: putting shards together, and what is written and digested of them. Does not know: segments, folders, when the
other ranks stand still.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rollplex.layout.optimizer import OptimizerTable
from rollplex.layout.parallel.plan import Parameter
from rollplex.layout.parallel.slices import Slice, slice_of
from rollplex.layout.parallel.split import Range
from rollplex.layout.parameters import ParameterTable, Stored
from rollplex.memory.digest import TableDigest
from rollplex.memory.tensors import DTYPES
from rollplex.model.tensor_file import Form, raw_bytes, write_tensors
from rollplex.model.weights import METADATA, save_files
from rollplex_trainer.state_file import STEP, forms_of, metadata


class WholeTensors:
    """Tensors of a parameter table that each rank has shards of: weights, gradients, or optimizer state of one kind."""

    def __init__(self, ranks: Iterable[tuple[Iterable[Parameter], Mapping[str, Tensor]]]) -> None:
        """ranks: of a tensor-parallel group the parameters of each, and for each of these a tensor, by name."""
        self._entries: dict[str, dict[Range, tuple[Slice, Tensor]]] = {}
        self._files: dict[str, dict[Range, tuple[Slice, Tensor]]] = {}
        for parameters, tensors in ranks:
            for parameter in parameters:
                cut = slice_of(parameter)
                own = (cut, tensors[parameter.name])
                # What every rank has whole is taken of the first.
                self._entries.setdefault(cut.entry, {}).setdefault(cut.stored, own)
                self._files.setdefault(cut.hf_name, {}).setdefault(cut.file, own)

    def stored(self, entry: Stored) -> Tensor:
        """As a segment with the whole table has it, padding included."""
        found = list(self._entries[entry.name].values())
        whole = torch.empty(entry.shape, dtype=found[0][1].dtype)
        for cut, shard in found:
            whole.narrow(cut.axis, cut.stored[0], cut.stored[1] - cut.stored[0]).copy_(shard)
        return whole

    def parameter(self, hf_name: str, shape: tuple[int, ...]) -> Tensor:
        """As transformers has it."""
        found = list(self._files[hf_name].values())
        whole = torch.empty(shape, dtype=found[0][1].dtype)
        for cut, shard in found:
            whole.narrow(cut.axis, cut.file[0], cut.size).copy_(shard.narrow(cut.axis, 0, cut.size))
        return whole


def whole_digest(table: ParameterTable, weights: WholeTensors) -> str:
    """The digest that the weights have where one device has them all."""
    running = TableDigest(table)
    for entry in table.entries:
        running.add(raw_bytes(weights.stored(entry)))
    return running.result()


def arena_parts(table: ParameterTable, gradients: WholeTensors) -> Iterator[Tensor]:
    """The numbers of a whole gradient arena, from its first to its last, gaps (0) included. table: of gradients."""
    for entry, following in zip(table.entries, [*table.entries[1:], None], strict=True):
        yield gradients.stored(entry)
        end = table.total_bytes if following is None else following.offset
        gap = end - entry.offset - entry.size_bytes
        yield torch.zeros(gap // table.item_bytes, dtype=DTYPES[table.dtype])


def write_weights(table: ParameterTable, weights: WholeTensors, source: Path, target: Path) -> None:
    """What `rollplex.model.weights.save_folder` writes. Raises CheckpointError as it does."""
    dtype = DTYPES[table.dtype]
    shapes = {piece.hf_name: piece.hf_shape for entry in table.entries for piece in entry.pieces}

    def write(file: Path, names: Mapping[str, str]) -> None:
        forms = {name: Form(shape=shapes[hf_name], dtype=dtype) for name, hf_name in names.items()}
        write_tensors(file, forms, lambda name: weights.parameter(names[name], shapes[names[name]]), metadata=METADATA)

    save_files(table, source, target, write)


def write_whole_state(
    file: Path, table: ParameterTable, states: OptimizerTable, kinds: Mapping[str, WholeTensors], step: Tensor
) -> None:
    """What `rollplex_trainer.state_file.write_state` writes of one device.

    Args:
        table: of the whole model's weights. states: its optimizer table.
        kinds: the state of each kind.
        step: int64, no dimensions, wherever it lies.

    Raises:
        OSError: the disk refuses.
    """

    def take(name: str) -> Tensor:
        if name == STEP:
            return step.cpu()
        kind, _, parameter = name.partition(".")
        return kinds[kind].stored(table.by_name(parameter))

    write_tensors(file, forms_of(states), take, metadata=metadata(states.name))
