"""Fresh weights of a preset, each tensor a function of (seed, name) alone. Names and shapes come from the layout."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollplex.layout.parameters import ParameterTable

MATRIX_STD: Final = 0.12
"""About 1 / sqrt(64). With transformers' 0.02 so small a model hardly learns."""


def fresh_weights(table: ParameterTable, seed: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """(transformers' name, float32 array) of every parameter: matrices normal, norms 1, biases 0."""
    for entry in table.entries:
        for piece in entry.pieces:
            yield piece.hf_name, _draw(piece.hf_name, piece.hf_shape, seed)


def _draw(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    if name.endswith(".bias"):
        return np.zeros(shape, dtype=np.float32)
    if len(shape) == 1:
        return np.ones(shape, dtype=np.float32)
    key = int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest(), "little")
    normal = np.random.Generator(np.random.Philox(key=key)).standard_normal(shape)
    return (MATRIX_STD * normal).astype(np.float32)
