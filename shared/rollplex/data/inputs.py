"""Where the prompts of a step lie in their inputs segment, and putting them there.

    for each prompt   ids [tokens] int64 · positions [3, tokens] int64 · for each medium its pixel rows float32
    each of them      starts at a multiple of 64 bytes; bytes between are not written and never read

Pure but for `write`, which fills a buffer it is given. Knows no files and no messages but the slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from rollplex.data.patches import Patches
from rollplex.data.prompts import Prompt
from rollplex.errors import SegmentError
from rollplex.protocol.common import MediaSlot, PromptSlot

ALIGN_BYTES = 64


class Prepared(Struct, frozen=True, kw_only=True, eq=False):
    """One row, ready to be written."""

    row: int
    prompt: Prompt
    media: tuple[Patches, ...]
    """In the order of their placeholders."""


def lay_out(prepared: Sequence[Prepared]) -> tuple[tuple[PromptSlot, ...], int]:
    """Slots of the prompts, groups numbered in this order, and the size of the segment in bytes."""
    slots: list[PromptSlot] = []
    at = 0
    for group, item in enumerate(prepared):
        tokens = len(item.prompt.ids)
        ids_offset = at
        positions_offset = _aligned(ids_offset + 8 * tokens)
        at = _aligned(positions_offset + 24 * tokens)
        media: list[MediaSlot] = []
        for patches in item.media:
            grid = patches.grid
            media.append(MediaSlot(offset=at, frames=grid.frames, height=grid.height, width=grid.width))
            at = _aligned(at + 4 * grid.rows * patches.row_width)
        slots.append(
            PromptSlot(
                group=group,
                row=item.row,
                tokens=tokens,
                ids_offset=ids_offset,
                positions_offset=positions_offset,
                next_position=item.prompt.next_position,
                media=tuple(media),
            )
        )
    return tuple(slots), at


def write(buffer: memoryview, prepared: Sequence[Prepared], slots: Sequence[PromptSlot]) -> None:
    """Write what was laid out.

    Raises:
        SegmentError: the buffer is smaller than the layout.
    """
    size = lay_out(prepared)[1]
    if len(buffer) < size:
        raise SegmentError("The inputs segment is too small", got=f"{len(buffer)} bytes", needed=f"{size}")
    for item, slot in zip(prepared, slots, strict=True):
        np.frombuffer(buffer, np.int64, slot.tokens, slot.ids_offset)[:] = item.prompt.ids
        positions = np.frombuffer(buffer, np.int64, 3 * slot.tokens, slot.positions_offset)
        positions.reshape(3, slot.tokens)[:] = item.prompt.positions
        for patches, medium in zip(item.media, slot.media, strict=True):
            rows = np.frombuffer(buffer, np.float32, medium.rows * patches.row_width, medium.offset)
            patches.write(rows.reshape(medium.rows, patches.row_width))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES
