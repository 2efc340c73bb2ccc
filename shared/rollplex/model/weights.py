"""Between model folders and the stored layout.

Owns: reading safetensors into stored parameters and writing them back under transformers' names, un-fused. Does not
know: segments, versions, how a checkpoint folder is made visible at once, optimizer state.

Names. A folder holds those of the published checkpoints ("model.layers.0…", "visual…"), which save_pretrained writes,
or transformers' own parameter names ("model.language_model.layers.0…", "model.visual…"). Both are read; a saved folder
has the names of the folder that it came from, so that whatever opened that one opens this one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollplex.errors import CheckpointError, ModelError
from rollplex.layout.fields import load
from rollplex.layout.parameters import ParameterTable
from rollplex.memory.tensors import hf_views

LM_HEAD = "lm_head.weight"
EMBEDDING = "model.language_model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 * 10**9
FLOATS = ("F64", "F32", "F16", "BF16")
"""safetensors' names of the dtypes that a parameter may have in a folder; it is converted to the table's."""
NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")


def fill(table: ParameterTable, views: Mapping[str, Tensor], folder: Path) -> None:
    """Fills stored parameters from a model folder; padding becomes 0.

    Args:
        table: of the stored parameters to fill: the actor's, or only the trainable ones (`reference_table`).
        views: stored name -> tensor, for every entry of `table`.
        folder: with model.safetensors, or shards and their index.

    Raises:
        ModelError: names the tensor that is missing, of another shape, not a float, or unknown, or the unreadable file.
    """
    targets = hf_views(views, table)
    for view in views.values():
        view.zero_()
    missing = set(targets)
    for name, where, file in _tensors(folder):
        parameter = canonical_name(name)
        target = targets.get(parameter)
        if target is None:
            _check_unneeded(parameter, table, where)
            continue
        part = file.get_slice(name)
        if tuple(part.get_shape()) != tuple(target.shape):
            raise ModelError(
                "a tensor has another shape", got=str(part.get_shape()), needed=str(list(target.shape)), where=where
            )
        if part.get_dtype() not in FLOATS:
            raise ModelError("a tensor is not a float", got=part.get_dtype(), needed=", ".join(FLOATS), where=where)
        target.copy_(file.get_tensor(name))
        missing.discard(parameter)
    if missing:
        raise ModelError("a tensor is missing", got=f"{len(missing)} missing", needed=min(missing), where=str(folder))


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
    names = {canonical_name(name): name for name, _, _ in _tensors(source_folder)}
    weights = {names.get(name, name): view for name, view in hf_views(views, table).items()}
    try:
        _copy_others(source_folder, target_folder, table.dtype)
        _save_weights(weights, target_folder)
        files = [file for file in target_folder.iterdir() if file.is_file()]
        for file in (*files, target_folder):
            _sync(file)
        return sum(file.stat().st_size for file in files)
    except OSError as error:
        raise CheckpointError("a checkpoint cannot be written", got=str(error), where=str(target_folder)) from error


def canonical_name(name: str) -> str:
    """transformers' parameter name of a tensor in a folder.

    The mapping is that of the published checkpoints (transformers/conversion_mapping.py, qwen2_5_vl).
    """
    if name.startswith("visual."):
        return f"model.{name}"
    if name.startswith("model.") and not name.startswith(("model.language_model.", "model.visual.")):
        return f"model.language_model.{name.removeprefix('model.')}"
    return name


def _check_unneeded(parameter: str, table: ParameterTable, where: str) -> None:
    """A tensor without a place is an error, unless it is a tied copy or this table has only some of the parameters."""
    tied = any(entry.tied for entry in table.entries)
    partial = table.header_bytes == 0
    if not (partial or (tied and parameter == LM_HEAD)):
        raise ModelError(
            "a tensor has no place in this architecture",
            got=parameter,
            needed="parameters of Qwen2.5-VL",
            where=where,
        )


def _tensors(folder: Path) -> Iterator[tuple[str, str, Any]]:
    """(name, where for messages, open file) of every tensor, file by file in order of name."""
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in sorted(file.keys()):
                    yield name, f"{path}: {name}", file
        except (SafetensorError, OSError) as error:
            raise ModelError("a weight file cannot be read", got=str(error), where=str(path)) from error


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        raise ModelError(
            "the folder has no weights",
            needed=f"{SINGLE}, or shards with {INDEX}",
            do="Save the model with save_pretrained; pickled weights are not read.",
            where=str(folder),
        )
    listed = load(folder / INDEX).get("weight_map")
    names = {str(name) for name in listed.values()} if isinstance(listed, dict) else set[str]()
    if not names or any(Path(name).name != name for name in names):
        raise ModelError("the index of shards is malformed", needed="plain file names", where=str(folder / INDEX))
    return [folder / name for name in sorted(names)]


def _save_weights(weights: Mapping[str, Tensor], folder: Path) -> None:
    shards = _shards(weights)
    files = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
    )
    for file, names in zip(files, shards, strict=True):
        tensors = {name: weights[name].detach().cpu().contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(w.numel() * w.element_size() for w in weights.values())},
            "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(weights: Mapping[str, Tensor]) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, weight in weights.items():
        more = weight.numel() * weight.element_size()
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
