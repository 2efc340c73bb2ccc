"""Pydantic's complaints about a configuration, in the words of `ConfigError`. Knows the keys, not the files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from rollplex.config.shorthand import as_written
from rollplex.config.yaml_text import Key, dotted
from rollplex.similar import closest

_ALIASES = {
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_new_tokens",
    "learning_rate": "optimizer.lr",
    "max_steps": "run.iterations",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "per_device_train_batch_size": "data.prompts_per_iteration",
}
"""Names of TRL's GRPOConfig, and the keys to look at here."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One thing that is wrong: the parts of a ConfigError, and the key path."""

    path: tuple[Key, ...]
    what: str
    got: str
    needed: str
    do: str


def refusals(error: ValidationError, model: type[BaseModel], value: object) -> list[Refusal]:
    """All complaints, unknown keys first (they explain missing ones), about key paths as they are in `value`.

    Pydantic counts only the good items of a list, so a list with a bad one may also be too short: that is left out.
    """
    items: list[dict[str, Any]] = [
        {**item, "loc": as_written(item["loc"], value)} for item in error.errors(include_url=False)
    ]
    places: list[tuple[Key, ...]] = [item["loc"] for item in items]
    found = [
        _refusal(item, model)
        for item, at in zip(items, places, strict=True)
        if item["type"] != "too_short" or not any(len(at) < len(place) and place[: len(at)] == at for place in places)
    ]
    return sorted(found, key=lambda refusal: not refusal.what.startswith("Unknown key"))


def _refusal(item: dict[str, Any], model: type[BaseModel]) -> Refusal:
    path: tuple[Key, ...] = item["loc"]
    kind: str = item["type"]
    if kind == "extra_forbidden":
        return Refusal(path=path, what=f"Unknown key {dotted(path)}", got="", needed="", do=_did_you_mean(path, model))
    if kind == "missing":
        what = f"The key {dotted(path)} is missing"
        return Refusal(path=path, what=what, got="", needed=_meaning(path, model), do=f"Set {dotted(path)}.")
    got = _shown(item["input"])
    expected: str = (
        item["msg"].removeprefix("Value error, ").removeprefix("Input should be ").removeprefix("Value should ")
    )
    suggestion = ""
    if kind in ("literal_error", "enum") and isinstance(item["input"], str):
        options = [option.strip("'") for option in expected.replace(" or ", ", ").split(", ")]
        close = closest(item["input"].lower(), options)
        suggestion = f"Did you mean {close}?" if close else ""
    if kind == "model_type":
        expected = "keys and values (a mapping)"
    if kind == "tuple_type":
        expected = "a list"
    if kind == "finite_number":
        expected = "a finite number"
    if kind == "json_invalid":
        return Refusal(path=path, what="The configuration holds a text that is not Unicode", got="", needed="", do="")
    what = (
        f"{dotted(path)} has a value that cannot be used" if path else "The configuration is not a mapping of sections"
    )
    return Refusal(path=path, what=what, got=got, needed=expected, do=suggestion)


def _did_you_mean(path: Sequence[Key], model: type[BaseModel]) -> str:
    """A suggestion for an unknown key: what TRL's name is here, a similar key of that section, or one of another."""
    wrong = str(path[-1])
    section = _model_at(path[:-1], model)
    siblings = list(section.model_fields) if section is not None else []
    paths = dict(_all_paths(model))
    if wrong in _ALIASES and not any(wrong.startswith(name) for name in siblings):
        return f"Did you mean {_ALIASES[wrong]}?"
    if close := closest(wrong, siblings):
        return f"Did you mean {dotted((*path[:-1], close))}?"
    if elsewhere := [full for full, name in paths.items() if name == wrong]:
        return f"Did you mean {' or '.join(sorted(elsewhere))}?"
    if close := closest(wrong, sorted(set(paths.values())), cutoff=0.8):
        return f"Did you mean {' or '.join(sorted(full for full, name in paths.items() if name == close))}?"
    return f"Known here: {', '.join(siblings)}."


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _model_at(path: Sequence[Key], model: type[BaseModel]) -> type[BaseModel] | None:
    for part in path:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = next(_models_in(field.annotation), None) if field is not None else None
        if inner is None:
            return None
        model = inner
    return model


def _all_paths(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key path (list items without their index) and its last part."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", name
        for inner in _models_in(field.annotation):
            yield from _all_paths(inner, f"{prefix}{name}.")


def _meaning(path: Sequence[Key], model: type[BaseModel]) -> str:
    section = _model_at(path[:-1], model)
    field = section.model_fields.get(str(path[-1])) if section is not None else None
    text = (field.description or "") if field is not None else ""
    return " ".join(text.split()).removesuffix(".")


def _shown(value: object) -> str:
    """A value as YAML users know it (true, null, "text"), cut to a line."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except ValueError:
        text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
