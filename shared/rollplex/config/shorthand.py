"""Shorter ways to write a configuration, put into the full form that the sections know.

Works on plain values as read from YAML. Refuses nothing: what is wrong stays as it is, for the sections to refuse.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from rollplex.config.yaml_text import Key

MAX_NAME = 64
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+", re.ASCII)


def written_out(value: object) -> object:
    """The configuration with `eval` as a list, and with a name for every evaluation that has none."""
    if not isinstance(value, dict) or "eval" not in value:
        return value
    evaluations = value["eval"]
    if isinstance(evaluations, dict):
        evaluations = [evaluations]
    if isinstance(evaluations, list):
        evaluations = [_named(item) for item in evaluations]
    return {**value, "eval": evaluations}


def as_written(path: Sequence[Key], value: object) -> tuple[Key, ...]:
    """A key path of the full form as it is in `value`: without the index where the user wrote no list."""
    kept: list[Key] = []
    for part in path:
        if isinstance(part, int) and isinstance(value, dict):
            continue
        kept.append(part)
        value = _item(value, part)
    return tuple(kept)


def name_of(file: str) -> str:
    """The name of an evaluation by its data's file: without folder and ending, other characters replaced."""
    return _NOT_IN_NAMES.sub("_", PurePath(file).stem).lstrip("_.-")[:MAX_NAME] or "eval"


def _named(evaluation: object) -> object:
    if not isinstance(evaluation, dict) or "name" in evaluation:
        return evaluation
    data = evaluation.get("data")
    return {"name": name_of(data if isinstance(data, str) else ""), **evaluation}


def _item(value: object, part: Key) -> object:
    if isinstance(value, dict):
        return value.get(part)
    if isinstance(value, list) and isinstance(part, int) and part < len(value):
        return value[part]
    return None
