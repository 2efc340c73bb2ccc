"""A safetensors file written one tensor at a time, byte for byte what `safetensors.torch.save_file` writes.

The library wants all tensors of a file in host memory at once: whole tensors of a model that is split over ranks are
nowhere, and the optimizer state of a model on a GPU is more than many hosts have. A file is an 8-byte little-endian
length, a JSON header of that length, and the numbers.

Owns: the form. Does not know: names, folders, where tensors come from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

DTYPE_NAMES: Final = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}
"""safetensors' names, in the order of the library, which puts the last ones first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(
    file: Path, forms: Mapping[str, Form], take: Callable[[str], Tensor], *, metadata: Mapping[str, str]
) -> None:
    """Write a file of these tensors.

    Args:
        take: the tensor of a name, contiguous and in host memory; it may be dropped before the next is asked for.
        metadata: one entry, as the library writes several in no order.

    Raises:
        OSError: the disk refuses.
    """
    ranks = list(DTYPE_NAMES)
    order = sorted(forms, key=lambda name: (-ranks.index(forms[name].dtype), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in order:
        end = offset + forms[name].size_bytes
        form = forms[name]
        header[name] = {"dtype": DTYPE_NAMES[form.dtype], "shape": list(form.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in order:  # no variable, which would keep a tensor while the next is made
            out.write(raw_bytes(_of_form(take(name), forms[name], name)))


def _of_form(value: Tensor, form: Form, name: str) -> Tensor:
    if (tuple(value.shape), value.dtype) != (form.shape, form.dtype):
        raise AssertionError(f"{name}: {tuple(value.shape)} {value.dtype}, needed {form}")
    return value


def write_each(file: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> None:
    """Write a file of tensors, wherever they lie: of a GPU's there is never more than one in host memory.

    Raises:
        OSError: the disk refuses.
    """
    forms = {name: Form(shape=tuple(value.shape), dtype=value.dtype) for name, value in tensors.items()}
    write_tensors(file, forms, lambda name: on_host(tensors[name]), metadata=metadata)


def on_host(value: Tensor) -> Tensor:
    """The tensor itself, where it lies there and is contiguous."""
    return value.detach().cpu().contiguous()


def raw_bytes(value: Tensor) -> memoryview:
    """The numbers of a tensor of host memory as they lie, row major."""
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().data
