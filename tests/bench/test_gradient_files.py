"""Two files of gradients compared: whole, by parameter, in every dtype, and what cannot be compared."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from rollplex.bench import gradient_files
from rollplex.bench.gradient_files import difference
from rollplex.bench.workload import Workload
from rollplex.errors import DataError
from rollplex.layout.parameters import ParameterTable, gradient_table, parameter_table
from rollplex.layout.shape import read_shape


def table_of(workload: Workload, dtype: str) -> ParameterTable:
    shape = read_shape(workload.config.parent / "model")
    return gradient_table(parameter_table(shape, dtype=dtype, freeze_vision=False))


def arena(table: ParameterTable, seed: int = 0) -> torch.Tensor:
    """Numbers in every entry, alignment gaps 0."""
    kind = getattr(torch, table.dtype)
    whole = torch.zeros(table.total_bytes // kind.itemsize, dtype=kind)
    drawn = torch.Generator().manual_seed(seed)
    for entry in table.entries:
        part(whole, table, entry.name).normal_(generator=drawn)
    return whole


def part(whole: torch.Tensor, table: ParameterTable, name: str) -> torch.Tensor:
    entry = table.by_name(name)
    first = entry.offset // table.item_bytes
    return whole[first : first + entry.size_bytes // table.item_bytes]


def write(file: Path, whole: torch.Tensor) -> Path:
    file.write_bytes(whole.view(torch.uint8).numpy().tobytes())
    return file


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_difference_is_relative_to_the_norm_and_the_worst_parameter_is_named(
    workload: Workload, tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_files, "BLOCK_NUMBERS", 1000)
    table = table_of(workload, dtype)
    one = arena(table)
    other, bias = one.clone(), "model.layers.1.self_attn.qkv_proj.bias"
    part(other, table, "model.layers.0.mlp.down_proj.weight").mul_(1.25)
    part(other, table, bias).mul_(1.5)
    found = difference(write(tmp_path / "a", one), write(tmp_path / "b", other), table)
    exact = [tensor.double().numpy() for tensor in (one, other)]
    assert found.norm == pytest.approx(float(np.linalg.norm(exact[0])))
    assert found.whole == pytest.approx(float(np.linalg.norm(exact[1] - exact[0])) / found.norm)
    assert found.parameter == bias
    assert found.worst == pytest.approx(0.5, rel=0.01)


def test_a_gpu_is_left_to_the_nodes(workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("a context on the GPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    table = table_of(workload, "bfloat16")
    one, other = (write(tmp_path / str(seed), arena(table, seed)) for seed in range(2))
    assert difference(one, other, table).whole > 1.0


def test_the_same_gradient_has_no_difference(workload: Workload, tmp_path: Path) -> None:
    table = table_of(workload, "float32")
    file = write(tmp_path / "a", arena(table))
    found = difference(file, file, table)
    assert (found.whole, found.worst) == (0.0, 0.0)


def test_a_parameter_whose_gradient_was_0_is_infinitely_far(workload: Workload, tmp_path: Path) -> None:
    table = table_of(workload, "float32")
    one, name = arena(table), "model.norm.weight"
    other = one.clone()
    part(one, table, name).zero_()
    found = difference(write(tmp_path / "a", one), write(tmp_path / "b", other), table)
    assert (found.worst, found.parameter) == (math.inf, name)
    assert 0.0 < found.whole < 1.0


def test_files_that_are_no_gradients_of_the_model_are_refused(workload: Workload, tmp_path: Path) -> None:
    table = table_of(workload, "float32")
    whole = write(tmp_path / "a", arena(table))
    (tmp_path / "short").write_bytes(b"short")
    with pytest.raises(DataError, match="not a gradient of the model; got 5 bytes"):
        difference(whole, tmp_path / "short", table)
    nothing = write(tmp_path / "zero", torch.zeros_like(arena(table)))
    with pytest.raises(DataError, match="cannot be compared with"):
        difference(nothing, whole, table)
    broken = arena(table)
    broken[0] = math.nan
    with pytest.raises(DataError, match="cannot be compared with"):
        difference(write(tmp_path / "nan", broken), whole, table)
