"""Files of tensors written one at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rollplex_trainer.tensor_file import Form, raw_bytes, write_tensors


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


def test_a_tensor_of_another_form_is_not_written(tmp_path: Path) -> None:
    forms = {"a": Form(shape=(2, 2), dtype=torch.float32)}
    with pytest.raises(AssertionError, match="a: "):
        write_tensors(tmp_path / "file", forms, lambda _: torch.zeros(4), metadata={"format": "pt"})


def test_raw_bytes_are_row_major_whatever_the_strides() -> None:
    value = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert bytes(raw_bytes(value.T)) == bytes(raw_bytes(value.T.contiguous()))
