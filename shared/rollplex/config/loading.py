"""From a YAML file and overrides to a `Config`, and back. Each refusal is a ConfigError with file, line and key."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from rollplex.config import yaml_text
from rollplex.config.config import Config
from rollplex.config.overrides import Override, apply, parse_override
from rollplex.config.refusals import Refusal, refusals
from rollplex.config.shorthand import as_written, written_out
from rollplex.config.yaml_text import Document, Key, dotted
from rollplex.errors import ConfigError
from rollplex.texts import require_text

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


def load(path: Path, overrides: Sequence[str] = (), *, check_files: bool = True) -> Config:
    """Read, override, check.

    Relative paths, those in overrides too, are meant from the folder of the file.

    Args:
        path: YAML file.
        overrides: `a.b=v` each, applied in order.
        check_files: also look whether the model folder, datasets and reward files are there.

    Raises:
        ConfigError: anything that is wrong, with file, line and key path in `where`.
    """
    require_text(path, "the configuration")
    try:
        text = _read(path).decode("utf-8")
    except OSError as error:
        raise ConfigError(
            "The configuration cannot be read", got=error.strerror or str(error), where=str(path)
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError("The configuration is not UTF-8 text", got=str(error.reason), where=str(path)) from None
    document = yaml_text.parse(text, where=str(path))
    parsed = [parse_override(override) for override in overrides]
    value = apply(document.value, parsed)
    source = _Source(path, document, parsed, value)
    config = _validate(value, path.absolute().parent, source)
    if check_files:
        _check_files(config, source, _written_model(value))
    return config


def _read(path: Path) -> bytes:
    """Of a file; a device or a pipe might never end. What is too long is refused by who parses it."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ConfigError("The configuration is not a file", needed="a YAML file", where=str(path))
    with path.open("rb") as file:
        return file.read(yaml_text.MAX_TEXT_BYTES + 1)


def from_mapping(value: Mapping[str, object], *, base: Path | None = None) -> Config:
    """A `Config` from plain values (as parsed from YAML); files are not looked at.

    Raises:
        ConfigError: anything that is wrong, with the key path in `where`.
    """
    return _validate(dict(value), base, _Source(None, Document(value=None, lines={}), [], value))


def dump(config: Config) -> str:
    """YAML text with every key, defaults included, from which `load` makes an equal `Config`."""
    return yaml_text.dumps(config.model_dump(mode="json"))


class _Source:
    """Where a key's value came from: an override, a line of the file, or nowhere. `value`: all of them together."""

    def __init__(self, file: Path | None, document: Document, overrides: Sequence[Override], value: object) -> None:
        self.value = value
        self._file = file
        self._document = document
        self._overrides = overrides

    def where(self, path: Sequence[Key]) -> str:
        path = as_written(path, self.value)
        parts = tuple(str(part) for part in path)
        for override in reversed(self._overrides):
            shared = min(len(parts), len(override.path))
            if parts and parts[:shared] == override.path[:shared]:
                return override.where
        place = "" if self._file is None else str(self._file)
        if place and (line := self._document.line(path)) is not None:
            place += f":{line}"
        return ": ".join(part for part in (place, dotted(path)) if part)


def _validate(value: object, base: Path | None, source: _Source) -> Config:
    try:
        # JSON is the form in which pydantic's strict mode takes lists for tuples and texts for paths and enums.
        text = json.dumps({} if value is None else written_out(value))
        return Config.model_validate_json(text, context={"base": base})
    except ValidationError as error:
        raise _refused(refusals(error, Config, source.value), source) from None
    except ConfigError as error:
        path = tuple(error.where.split("."))
        raise ConfigError(
            error.what, got=error.got, needed=error.needed, do=error.do, where=source.where(path)
        ) from None


def _refused(found: Sequence[Refusal], source: _Source) -> ConfigError:
    """One error for all refusals: the first in full, the others a line each."""
    first = found[0]
    more = [
        "\n  also " + str(ConfigError(r.what, got=r.got, needed=r.needed, do=r.do, where=source.where(r.path)))
        for r in found[1:]
    ]
    return ConfigError(
        first.what, got=first.got, needed=first.needed, do=first.do + "".join(more), where=source.where(first.path)
    )


def _written_model(value: object) -> str:
    """model.path as it was written, of a configuration that was found valid."""
    return str(value["model"]["path"]) if isinstance(value, dict) else ""


def _check_files(config: Config, source: _Source, model: str) -> None:
    if not (config.model.path / "config.json").is_file():
        raise ConfigError(
            "The model folder is not there or holds no config.json",
            got=str(config.model.path),
            needed="a folder in the format of Hugging Face",
            do=_how_to_download(model) if not config.model.path.parent.exists() else "",
            where=source.where(("model", "path")),
        )
    _check_data(config.data.path, config.data.image_folder, ("data",), "path", source)
    for index, evaluation in enumerate(config.eval):
        _check_data(evaluation.data, evaluation.image_folder, ("eval", index), "data", source)
    template = config.data.chat_template
    if template is not None and not template.is_file():
        raise ConfigError(
            "The file of the chat template is not there",
            got=str(template),
            where=source.where(("data", "chat_template")),
        )
    recorded = config.rollout.replay
    if recorded is not None and not recorded.is_file():
        raise ConfigError(
            "The recorded responses are not there",
            got=str(recorded),
            needed="a completions.jsonl that was written with run.log_tokens: true",
            where=source.where(("rollout", "replay")),
        )
    for index, function in enumerate(config.rewards.functions):
        place = function.function.rpartition(":")[0]
        if place.endswith(".py") and not Path(place).is_file():
            raise ConfigError(
                "The file of a reward function is not there",
                got=place,
                where=source.where(("rewards", "functions", index, "function")),
            )


def _how_to_download(model: str) -> str:
    """What to do about a Hub id where a folder is needed; empty for what is none."""
    if _HUB_ID.fullmatch(model) is None:
        return ""
    folder = model.rpartition("/")[2]
    return f"Hub ids are not downloaded: `hf download {model} --local-dir {folder}`, then give that folder."


def _check_data(file: Path, images: Path, section: tuple[Key, ...], key: str, source: _Source) -> None:
    if not file.exists():
        raise ConfigError(
            "The dataset is not there",
            got=str(file),
            needed="a .jsonl, .json or .parquet file, or a folder",
            where=source.where((*section, key)),
        )
    if not images.is_dir():
        raise ConfigError(
            "The folder of the images is not there", got=str(images), where=source.where((*section, "image_dir"))
        )
