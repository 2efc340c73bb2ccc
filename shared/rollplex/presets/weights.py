"""Fresh weights of a preset, each tensor a function of (seed, name) alone. Names and shapes come from the layout.

    float32     drawn by numpy; the same bytes on every machine
    bfloat16    drawn by torch, on a GPU if there is one: 3.7 billion numbers take seconds there, minutes on one core

A GPU and a processor draw different numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rollplex.layout.parameters import ParameterTable, Piece

if TYPE_CHECKING:
    from torch import Tensor


def fresh_weights(table: ParameterTable, seed: int, std: float) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """(transformers' name, float32 array) of every parameter: matrices normal, norms 1, biases 0."""
    for piece in pieces(table):
        yield piece.hf_name, _draw(piece.hf_name, piece.hf_shape, seed, std)


def fresh_tensors(table: ParameterTable, seed: int, std: float) -> Iterator[tuple[str, Tensor]]:
    """(transformers' name, bfloat16 tensor in host memory) of every parameter, by the same rules, one at a time."""
    import torch  # noqa: PLC0415 - only large presets need it

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for piece in pieces(table):
        constant = _constant(piece.hf_name, piece.hf_shape)
        if constant is not None:
            yield piece.hf_name, torch.full(piece.hf_shape, constant, dtype=torch.bfloat16)
            continue
        generator = torch.Generator(device).manual_seed(_key(piece.hf_name, seed) >> 65)  # it takes 63 bits
        drawn = torch.empty(piece.hf_shape, dtype=torch.bfloat16, device=device)
        yield piece.hf_name, drawn.normal_(0.0, std, generator=generator).cpu()


def pieces(table: ParameterTable) -> Iterator[Piece]:
    """Every parameter of transformers, in the order of the table."""
    return (piece for entry in table.entries for piece in entry.pieces)


def _draw(name: str, shape: tuple[int, ...], seed: int, std: float) -> NDArray[np.float32]:
    constant = _constant(name, shape)
    if constant is not None:
        return np.full(shape, constant, dtype=np.float32)
    normal = np.random.Generator(np.random.Philox(key=_key(name, seed))).standard_normal(shape)
    return (std * normal).astype(np.float32)


def _constant(name: str, shape: tuple[int, ...]) -> float | None:
    """What all numbers of a bias or a norm are; None: it is a matrix."""
    if name.endswith(".bias"):
        return 0.0
    return 1.0 if len(shape) == 1 else None


def _key(name: str, seed: int) -> int:
    """128 bits."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest(), "little")
