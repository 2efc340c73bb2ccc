"""Weights of two runs after the same update, in files made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollplex.bench.weight_files import weights_difference
from rollplex.errors import DataError


def folder(path: Path, *numbers: float, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Two tensors in two files."""
    path.mkdir()
    save_file({"a": torch.tensor(numbers[:2], dtype=dtype)}, path / "model-1.safetensors")
    save_file({"b": torch.tensor(numbers[2:], dtype=dtype)}, path / "model-2.safetensors")
    return path


def test_the_difference_is_told_as_a_part_of_the_update(tmp_path: Path) -> None:
    before = folder(tmp_path / "before", 0.0, 0.0, 0.0, 0.0)
    one = folder(tmp_path / "one", 3.0, 0.0, 4.0, 0.0)
    other = folder(tmp_path / "other", 3.0, 0.0, 4.0, -0.5)
    found = weights_difference(before, one, other)
    assert (found.whole, found.largest, found.unequal, found.changed) == (0.1, 0.5, 0.25, 0.5)
    assert weights_difference(before, one, one).whole == 0.0


def test_other_tensors_and_an_update_that_changes_nothing_are_refused(tmp_path: Path) -> None:
    before = folder(tmp_path / "before", 1.0, 2.0, 3.0)
    save_file({"c": torch.zeros(1)}, folder(tmp_path / "more", 1.0, 2.0, 3.0) / "model-3.safetensors")
    with pytest.raises(DataError, match="different tensors"):
        weights_difference(before, before, tmp_path / "more")
    with pytest.raises(DataError, match="changed no weight"):
        weights_difference(before, before, before)
