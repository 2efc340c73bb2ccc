"""A small valid configuration: as values, and as a file beside what it names."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from rollplex.config import Config, from_mapping
from rollplex.config.yaml_text import dumps

_VALUES: dict[str, Any] = {
    "model": {"path": "model"},
    "data": {"path": "rows.jsonl", "prompts_per_iteration": 8},
    "rewards": {"functions": [{"function": "score.py:score", "weight": 1.0}]},
    "eval": [{"name": "held_out", "data": "other/rows.jsonl"}],
}


@pytest.fixture
def values() -> dict[str, Any]:
    """A valid configuration as parsed from YAML; to be changed at will."""
    return deepcopy(_VALUES)


@pytest.fixture
def make(values: dict[str, Any]) -> Callable[..., Config]:
    """A `Config` from the valid one with some sections' keys replaced: make(run={"seed": 1})."""

    def build(**sections: Any) -> Config:
        for name, section in sections.items():
            values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
        return from_mapping(values)

    return build


@pytest.fixture
def config_file(tmp_path: Path, values: dict[str, Any]) -> Path:
    """The valid configuration as a file, with everything that it names beside it."""
    folder = tmp_path / "job"
    (folder / "model").mkdir(parents=True)
    (folder / "other").mkdir()
    for name in ("model/config.json", "rows.jsonl", "score.py", "other/rows.jsonl"):
        (folder / name).touch()
    file = folder / "config.yaml"
    file.write_text(dumps(values))
    return file
