"""A gradient arena as a file: the numbers as they lie in memory, without a header.

Owns the writing. What lies where is `rollplex.layout.parameters.gradient_table`; who compares such files is
`rollplex.bench.gradients`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rollplex.errors import UpdateError

CHUNK_NUMBERS = 2**25
"""Copied to host memory at a time: an arena on a GPU may be larger than what the host has free."""


def keep_gradients(arena: Tensor, file: Path) -> int:
    """Write all numbers of an arena; the file is there whole or not at all. Returns its bytes.

    Raises:
        UpdateError: it cannot be written.
    """
    partial = file.with_name(f".{file.name}.new")
    try:
        file.parent.mkdir(exist_ok=True)
        with partial.open("wb") as out:
            for part in torch.split(arena, CHUNK_NUMBERS):
                out.write(part.cpu().view(torch.uint8).numpy().data)
        partial.replace(file)
        return file.stat().st_size
    except OSError as error:
        raise UpdateError(
            "The gradients cannot be kept",
            got=str(error),
            needed=f"{arena.numel() * arena.element_size():,} bytes on disk",
            do="Free space, or set run.keep_gradients to false.",
            where=str(file),
        ) from error
