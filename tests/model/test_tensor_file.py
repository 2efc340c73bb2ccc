"""Files of tensors written one at a time."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollplex.model import tensor_file
from rollplex.model.tensor_file import Form, raw_bytes, write_each, write_tensors


def tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        "b.weight": torch.randn(3, 5, generator=draw),
        "a.weight": torch.randn(7, generator=draw),
        "half": torch.randn(5, 1, 3, generator=draw).bfloat16(),
        "double": torch.randn(2, 2, generator=draw).double(),
        "none": torch.empty(0, 4),
        "step": torch.tensor(12),
    }


@pytest.mark.parametrize("names", [["step"], ["b.weight", "a.weight"], list(tensors())])
def test_a_file_is_byte_for_byte_what_the_library_writes(tmp_path: Path, names: list[str]) -> None:
    values = {name: tensors()[name] for name in names}
    save_file(values, tmp_path / "theirs", metadata={"optimizer": "adamw"})
    forms = {name: Form(shape=tuple(value.shape), dtype=value.dtype) for name, value in values.items()}
    asked = []

    def take(name: str) -> Tensor:
        asked.append(name)
        return values[name]

    write_tensors(tmp_path / "ours", forms, take, metadata={"optimizer": "adamw"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert sorted(asked) == sorted(names), "each once"


def test_of_tensors_that_lie_elsewhere_there_is_one_in_host_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[weakref.ref[Tensor]] = []

    def copied(value: Tensor) -> Tensor:
        assert all(copy() is None for copy in copies)
        copy = value.clone()
        copies.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(tensor_file, "on_host", copied)
    write_each(tmp_path / "ours", tensors(), metadata={"format": "pt"})
    save_file(tensors(), tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert len(copies) == len(tensors())


def test_a_view_is_written_as_its_numbers_are_read(tmp_path: Path) -> None:
    value = torch.arange(6, dtype=torch.float32).view(2, 3).T
    write_each(tmp_path / "file", {"a": value}, metadata={"format": "pt"})
    assert torch.equal(load_file(tmp_path / "file")["a"], value)


def test_a_tensor_of_another_form_is_not_written(tmp_path: Path) -> None:
    forms = {"a": Form(shape=(2, 2), dtype=torch.float32)}
    with pytest.raises(AssertionError, match="a: "):
        write_tensors(tmp_path / "file", forms, lambda _: torch.zeros(4), metadata={"format": "pt"})


def test_raw_bytes_are_row_major_whatever_the_strides() -> None:
    value = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert bytes(raw_bytes(value.T)) == bytes(raw_bytes(value.T.contiguous()))
