"""Between model folders and the stored layout.

Owns: reading safetensors into stored parameters and writing them back under transformers' names, un-fused. Does not
know: segments, versions, how a checkpoint folder is made visible at once, optimizer state.

Names. Those of the published checkpoints and transformers' own are read (`rollplex.layout.weight_files`); a saved
folder has the names of the one that it came from, so that whatever opened that one opens this one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollplex.errors import CheckpointError, ModelError
from rollplex.layout.fields import load
from rollplex.layout.parameters import ParameterTable
from rollplex.layout.weight_files import INDEX, OTHER_FORMATS, SINGLE, canonical_name, placed, stored_tensors
from rollplex.memory.tensors import hf_views
from rollplex.model.tensor_file import write_each

SHARD_BYTES = 5 * 10**9
METADATA = {"format": "pt"}
"""Of a safetensors file of weights."""
NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin.index.json", *OTHER_FORMATS)


def fill(table: ParameterTable, views: Mapping[str, Tensor], folder: Path) -> None:
    """Fills stored parameters from a model folder; padding becomes 0.

    Args:
        table: of the stored parameters to fill: the actor's, or only the trainable ones (`reference_table`).
        views: stored name -> tensor, for every entry of `table`.
        folder: with model.safetensors, or shards and their index.

    Raises:
        ModelError: see `rollplex.layout.weight_files.placed`.
    """
    targets = hf_views(views, table)
    files = placed(table, folder)
    for view in views.values():
        view.zero_()
    for path, names in files.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name, parameter in names.items():
                    targets[parameter].copy_(file.get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise ModelError("a weight file cannot be read", got=str(error), where=str(path)) from error


def save_folder(table: ParameterTable, views: Mapping[str, Tensor], source_folder: Path, target_folder: Path) -> int:
    """Writes a folder that `from_pretrained` opens: weights un-fused, everything else as in `source_folder`.

    config.json's dtype becomes the table's. Every file is on disk (fsync) when this returns; the caller makes the
    folder visible.

    Args:
        table: all parameters (the actor's).
        views: stored name -> tensor.
        source_folder: the folder that the run started from: configuration, tokenizer, processor, names of tensors.
        target_folder: must exist and be empty.

    Returns:
        Bytes written.

    Raises:
        CheckpointError: a file cannot be written.
    """
    weights = hf_views(views, table)

    def write(file: Path, names: Mapping[str, str]) -> None:
        write_each(file, {name: weights[parameter] for name, parameter in names.items()}, metadata=METADATA)

    return save_files(table, source_folder, target_folder, write)


def save_files(
    table: ParameterTable, source_folder: Path, target_folder: Path, write: Callable[[Path, Mapping[str, str]], None]
) -> int:
    """`save_folder` for whoever has no views on whole weights.

    Args:
        write: writes one safetensors file with METADATA: of each tensor its name in the file, and transformers' name.

    Raises:
        CheckpointError: a file cannot be written.
    """
    try:
        _copy_others(source_folder, target_folder, table.dtype)
        _save_weights(table, source_folder, target_folder, write)
        files = [file for file in target_folder.iterdir() if file.is_file()]
        for file in (*files, target_folder):
            _sync(file)
        return sum(file.stat().st_size for file in files)
    except OSError as error:
        raise CheckpointError("a checkpoint cannot be written", got=str(error), where=str(target_folder)) from error


def _save_weights(
    table: ParameterTable, source_folder: Path, folder: Path, write: Callable[[Path, Mapping[str, str]], None]
) -> None:
    names = {canonical_name(tensor.name): tensor.name for tensor in stored_tensors(source_folder)}
    pieces = [piece for entry in table.entries for piece in entry.pieces]
    sizes = {piece.hf_name: prod(piece.hf_shape) * table.item_bytes for piece in pieces}
    shards = _shards(sizes)
    files = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
    )
    for file, parameters in zip(files, shards, strict=True):
        write(folder / file, {names.get(name, name): name for name in parameters})
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {
                names.get(name, name): file for file, inside in zip(files, shards, strict=True) for name in inside
            },
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(sizes: Mapping[str, int]) -> list[list[str]]:
    """Names by file. sizes: bytes of each tensor."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, more in sizes.items():
        if shards[-1] and size + more > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += more
    return shards


def _copy_others(source: Path, target: Path, dtype: str) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(NOT_COPIED):
            shutil.copyfile(file, target / file.name)
    config = load(source / "config.json")
    for section in (config, config.get("text_config"), config.get("vision_config")):
        if isinstance(section, dict):
            for key in ("dtype", "torch_dtype"):
                if key in section:
                    section[key] = dtype
    if "dtype" not in config and "torch_dtype" not in config:
        config["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
