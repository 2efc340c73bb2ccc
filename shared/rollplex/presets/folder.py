"""Writes a preset as a folder that from_pretrained opens."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.numpy import save_file

from rollplex.errors import ConfigError
from rollplex.layout.parameters import parameter_table
from rollplex.layout.shape import read_shape
from rollplex.presets.architecture import MAX_TOKENS, PRESETS, generation_config, image_config, model_config
from rollplex.presets.tokenizer import build_tokenizer, token_ids, tokenizer_files, write_texts
from rollplex.presets.weights import fresh_weights


def write_preset(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write the model folder of preset `name`; files that are there are replaced, with the same bytes for one seed.

    Returns:
        `folder`.

    Raises:
        ConfigError: there is no such preset.
        OSError: the folder cannot be written.
    """
    preset = PRESETS.get(name)
    if preset is None:
        raise ConfigError("There is no such preset", got=repr(name), needed=" or ".join(PRESETS))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(preset.vocab)
    ids = token_ids(tokenizer)
    write_texts(folder, tokenizer_files(tokenizer, MAX_TOKENS))
    settings = {
        "config.json": model_config(preset, ids),
        "generation_config.json": generation_config(ids),
        "preprocessor_config.json": image_config(),
    }
    write_texts(folder, {file: json.dumps(content, indent=2) + "\n" for file, content in settings.items()})
    table = parameter_table(read_shape(folder), dtype="float32", freeze_vision=False)
    weights = folder / "model.safetensors"
    save_file(dict(fresh_weights(table, seed)), weights, metadata={"format": "pt"})
    weights.chmod((folder / "config.json").stat().st_mode & 0o777)  # safetensors makes its files 0600
    return folder
