"""The summed gradients as the trainer left them, under transformers' names, in blocks of float64.

Owns: reading a gradient arena's bytes by the parameter table. Does not know: who computed them, or with what they are
compared. No torch: bfloat16 is widened here.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from rollplex.layout.parameters import ParameterTable, Piece, Stored

Bytes: TypeAlias = npt.NDArray[np.uint8]
Float64s: TypeAlias = npt.NDArray[np.float64]
BLOCK_NUMBERS: Final = 2**20
"""Widened at a time: an embedding of a large model would be gigabytes."""
_STORED: Final[dict[str, Any]] = {"float32": np.float32, "float64": np.float64, "bfloat16": np.uint16}


def read_only(fd: int, size_bytes: int) -> Bytes:
    """A segment's bytes, without a copy; mapped until the last array over them is gone.

    Raises:
        OSError: it cannot be mapped.
    """
    return np.frombuffer(mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ), dtype=np.uint8)


class Gradients:
    """Gradients of every trainable parameter.

    Args:
        content: of an arena.
        table: `rollplex.layout.parameters.gradient_table`.
    """

    def __init__(self, content: Bytes, table: ParameterTable) -> None:
        self._content = content
        self._table = table

    @property
    def names(self) -> tuple[str, ...]:
        """transformers' names, in the order of the table."""
        return tuple(piece.hf_name for entry in self._table.entries for piece in entry.pieces)

    def copied(self) -> Gradients:
        """The same numbers, wherever the arena goes from here."""
        return Gradients(self._content.copy(), self._table)

    def blocks(self, name: str) -> Iterator[Float64s]:
        """All numbers of a parameter, flat, at most about `BLOCK_NUMBERS` at a time; padding left out."""
        entry, piece = self._table.by_hf_name(name)
        rows = self._rows(entry, piece)
        step = max(1, BLOCK_NUMBERS // max(1, rows[:1].size))
        for start in range(0, len(rows), step):
            yield _widened(rows[start : start + step], self._table.dtype)

    def _rows(self, entry: Stored, piece: Piece) -> npt.NDArray[Any]:
        stored = self._content[entry.offset : entry.offset + entry.size_bytes]
        rows: npt.NDArray[Any] = stored.view(_STORED[self._table.dtype]).reshape(entry.shape)[slice(*piece.rows)]
        return rows if piece.cols is None else rows[:, slice(*piece.cols)]


def _widened(numbers: npt.NDArray[Any], dtype: str) -> Float64s:
    flat = numbers.reshape(-1)
    if dtype == "bfloat16":  # the upper half of a float32
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    return flat.astype(np.float64)
