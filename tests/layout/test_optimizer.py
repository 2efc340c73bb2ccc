"""The layout of the optimizer state."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from rollplex.errors import ConfigError
from rollplex.layout.optimizer import STEP_OFFSET, optimizer_table
from rollplex.layout.parameters import ParameterTable, parameter_table
from rollplex.layout.shape import read_shape


@pytest.fixture
def table_of(tiny: dict[str, Any], folder: Callable[..., Path]) -> Callable[[str], ParameterTable]:
    shape = read_shape(folder(tiny))
    return lambda dtype: parameter_table(shape, dtype=dtype, freeze_vision=True)


@pytest.mark.parametrize(
    ("dtype", "name", "momentum", "kinds"),
    [
        ("float32", "adamw", 0.9, ("exp_avg", "exp_avg_sq")),
        ("float64", "adamw", 0.0, ("exp_avg", "exp_avg_sq")),
        ("bfloat16", "adamw", 0.0, ("master", "exp_avg", "exp_avg_sq")),
        ("float32", "sgd", 0.9, ("momentum_buffer",)),
        ("bfloat16", "sgd", 0.9, ("master", "momentum_buffer")),
        ("bfloat16", "sgd", 0.0, ("master",)),
        ("float32", "sgd", 0.0, ()),
    ],
)
def test_states_per_optimizer_and_dtype(
    table_of: Callable[[str], ParameterTable], dtype: str, name: str, momentum: float, kinds: tuple[str, ...]
) -> None:
    table = table_of(dtype)
    states = optimizer_table(table, name=name, momentum=momentum)
    assert states.kinds == kinds
    assert states.dtype == ("float64" if dtype == "float64" else "float32")
    assert [(s.parameter, s.kind, s.shape) for s in states.states] == [
        (entry.name, kind, entry.shape) for entry in table.trainable_entries for kind in kinds
    ]
    end = STEP_OFFSET + 8
    for state in states.states:
        assert state.offset % 256 == 0
        assert 0 <= state.offset - end < 256
        assert state.size_bytes == prod(state.shape) * (8 if dtype == "float64" else 4)
        assert states.get(state.parameter, state.kind) is state
        end = state.offset + state.size_bytes
    assert 0 <= states.total_bytes - end < 256


def test_the_hash_tells_tables_apart(table_of: Callable[[str], ParameterTable]) -> None:
    tables = [
        optimizer_table(table_of(dtype), name=name, momentum=momentum)
        for dtype in ("float32", "bfloat16", "float64")
        for name, momentum in (("adamw", 0.0), ("sgd", 0.9), ("sgd", 0.0))
    ]
    assert len({table.hash for table in tables}) == len(tables)
    assert optimizer_table(table_of("float32"), name="adamw", momentum=0.5).hash == tables[0].hash


def test_an_unknown_optimizer_is_refused(table_of: Callable[[str], ParameterTable]) -> None:
    with pytest.raises(ConfigError, match="lion"):
        optimizer_table(table_of("float32"), name="lion", momentum=0.0)
