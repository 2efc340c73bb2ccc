"""Writes a preset as a folder that from_pretrained opens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path

from safetensors.numpy import save_file

from rollplex.errors import ConfigError
from rollplex.layout.parameters import ITEM_BYTES, ParameterTable, parameter_table
from rollplex.layout.shape import read_shape
from rollplex.layout.weight_files import INDEX, SINGLE
from rollplex.presets.architecture import PRESETS, Preset, generation_config, image_config, model_config
from rollplex.presets.tokenizer import build_tokenizer, token_ids, tokenizer_files, write_texts
from rollplex.presets.weights import fresh_tensors, fresh_weights, pieces

SHARD_BYTES = 10**9
"""Of one weight file: so much, and a copy of it, is in memory while a large preset is written."""


def write_preset(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write the model folder of preset `name`; files that are there are replaced, with the same bytes for one seed (in
    bfloat16: on machines with a GPU, and on those without one).

    Returns:
        `folder`.

    Raises:
        ConfigError: there is no such preset.
        OSError: the folder cannot be written.
    """
    return write_model(preset_named(name), folder, seed=seed)


def preset_named(name: str) -> Preset:
    """The preset. Raises ConfigError if there is none of that name."""
    preset = PRESETS.get(name)
    if preset is None:
        raise ConfigError("There is no such preset", got=repr(name), needed=" or ".join(PRESETS))
    return preset


def write_model(preset: Preset, folder: Path, *, seed: int = 0, shard_bytes: int = SHARD_BYTES) -> Path:
    """`write_preset`, for sizes that have no name.

    Args:
        shard_bytes: of a weight file in bfloat16, about; in float32 there is one file.
    """
    write_shape(preset, folder)
    for old in (*folder.glob("*.safetensors"), folder / INDEX):  # of another preset: it might be read first
        old.unlink(missing_ok=True)
    table = parameter_table(read_shape(folder), dtype=preset.dtype, freeze_vision=False)
    if preset.dtype == "float32":
        save_file(dict(fresh_weights(table, seed, preset.std)), folder / SINGLE, metadata={"format": "pt"})
    else:
        _write_shards(table, folder, seed=seed, std=preset.std, shard_bytes=shard_bytes)
    for file in folder.glob("*.safetensors"):
        file.chmod((folder / "config.json").stat().st_mode & 0o777)  # safetensors makes its files 0600
    return folder


def write_shape(preset: Preset, folder: Path) -> Path:
    """Everything of a model folder but the weights.

    Returns:
        `folder`.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(preset.vocab, preset.words)
    ids = token_ids(tokenizer)
    write_texts(folder, tokenizer_files(tokenizer, preset.max_tokens))
    settings = {
        "config.json": model_config(preset, ids),
        "generation_config.json": generation_config(ids),
        "preprocessor_config.json": image_config(),
    }
    write_texts(folder, {file: json.dumps(content, indent=2) + "\n" for file, content in settings.items()})
    return folder


def _write_shards(table: ParameterTable, folder: Path, *, seed: int, std: float, shard_bytes: int) -> None:
    """One file after the other, each drawn only when the one before it is written."""
    from safetensors.torch import save_file as save_tensors  # noqa: PLC0415 - imports torch

    shards = list(_shards(table, shard_bytes))
    tensors = fresh_tensors(table, seed, std)
    placed: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        held = dict(next(tensors) for _ in names)
        assert list(held) == names, "drawn in the order of the table"
        save_tensors(held, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(names, file)
    size = sum(prod(piece.hf_shape) for piece in pieces(table)) * ITEM_BYTES[table.dtype]
    index = {"metadata": {"total_size": size}, "weight_map": placed}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(table: ParameterTable, shard_bytes: int) -> Iterator[list[str]]:
    """Names, in the order of the table, by file."""
    names: list[str] = []
    size = 0
    for piece in pieces(table):
        more = prod(piece.hf_shape) * ITEM_BYTES[table.dtype]
        if names and size + more > shard_bytes:
            yield names
            names, size = [], 0
        names.append(piece.hf_name)
        size += more
    yield names
