"""A gradient arena as a file: the numbers as they lie in memory, without a header.

Owns the writing. What lies where is `rollplex.layout.parameters.gradient_table`; who compares such files is
`rollplex.bench.gradients`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from rollplex.errors import UpdateError
from rollplex.model.tensor_file import raw_bytes
from rollplex.whole_file import whole_file

CHUNK_NUMBERS = 2**25
"""Copied to host memory at a time: an arena on a GPU may be larger than what the host has free."""


def keep_gradients(parts: Iterable[Tensor], file: Path, size_bytes: int) -> int:
    """Write all numbers of an arena; the file is there whole or not at all. Returns its bytes.

    Args:
        parts: of the arena, one after the other, without gaps.
        size_bytes: of all of them.

    Raises:
        UpdateError: it cannot be written.
    """
    try:
        file.parent.mkdir(exist_ok=True)
        with whole_file(file) as out:
            for part in parts:
                out.write(raw_bytes(part.cpu()))
        return file.stat().st_size
    except OSError as error:
        raise UpdateError(
            "The gradients cannot be kept",
            got=str(error),
            needed=f"{size_bytes:,} bytes on disk",
            do="Free space, or set run.keep_gradients to false.",
            where=str(file),
        ) from error
