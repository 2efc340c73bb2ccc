"""Carries out `rollplex data check`: from arguments to a dataset, its report, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import msgspec

from rollplex.cli.data_report import lines_of
from rollplex.config import Config, from_mapping, load
from rollplex.config.overrides import apply, parse_override
from rollplex.config.wire import data_sources
from rollplex.data.report import examine
from rollplex.errors import ConfigError, DataError, ModelError
from rollplex.protocol.inputs import DataSource

EXIT_GOOD, EXIT_BAD = 0, 1


def check_dataset(
    file: Path | None,
    *,
    config: Path | None,
    model: Path | None,
    overrides: Sequence[str],
    image_dir: Path | None,
    decode: bool,
    strict: bool,
    as_json: bool,
    say: Callable[[str], object],
) -> int:
    """Check a dataset and print what was found.

    Returns:
        0: all rows are good; 1: some are not, or, if `strict`, there are warnings.

    Raises:
        ConfigError: the arguments, the configuration, the model or the dataset as a whole cannot be used.
    """
    if file is None and config is None:
        raise ConfigError("No dataset is named", needed="FILE, or --config CONFIG")
    source, folder = _source(file, config, model, overrides, image_dir)
    if folder is not None and not (folder / "config.json").is_file():
        what = "The model folder is not there or holds no config.json"
        raise ConfigError(what, got=str(folder), needed="a folder in the format of Hugging Face")
    try:
        report = examine(source, folder, decode=decode)
    except (DataError, ModelError) as error:
        raise ConfigError(error.what, got=error.got, needed=error.needed, do=error.do, where=error.where) from error
    if as_json:
        say(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        for line in lines_of(report):
            say(line)
    return EXIT_BAD if report.num_errors or (strict and report.warnings) else EXIT_GOOD


def _source(
    file: Path | None, config: Path | None, model: Path | None, overrides: Sequence[str], image_dir: Path | None
) -> tuple[DataSource, Path | None]:
    """The dataset, read as a run would read it, and the model folder."""
    given: list[str] = []
    for key, path in (("data.path", file), ("data.image_dir", image_dir), ("model.path", model)):
        if path is not None:
            given.append(f"{key}={json.dumps(str(path.absolute()))}")
    if config is None:
        read = _without_file([*overrides, *given], Path.cwd())
        return data_sources(read)[0], model
    read = load(config, [*overrides, *given], check_files=False)
    return data_sources(read)[0], read.model.path


def _without_file(overrides: Sequence[str], base: Path) -> Config:
    """A configuration of nothing but what concerns the data."""
    value: object = {"model": {"path": "."}, "rewards": {"functions": [{"function": "none:none"}]}}
    changed = apply(value, [parse_override(override) for override in overrides])
    return from_mapping(cast("dict[str, object]", changed), base=base)
