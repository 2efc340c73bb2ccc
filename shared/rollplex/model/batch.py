"""Prompts of one prefix batch as tensors, right-padded.

Owns: reading prompts out of the inputs segment and padding them. Does not know: the model, images as pictures, or how
positions were found (the input child wrote them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollplex.errors import DataError
from rollplex.model.device import HOST
from rollplex.model.vision import Grid
from rollplex.protocol.common import PromptSlot

TensorSource = Callable[[int, tuple[int, ...], torch.dtype], Tensor]
"""(offset in bytes, shape, dtype) -> tensor over the inputs segment (`rollplex.memory.tensors.tensor`, bound to it)."""


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """Rows are prompts in the order given, each repeated `copies` times in a row (1 when prefixes are shared).

    ids: int64 [B, P], 0 at padding. positions: int64 [3, B, P], 0 at padding. lengths, next_positions: int64 [B].
    pixel_rows: float32 [sum of t*h*w, row_width] of all rows, or None. grids: one (t, h, w) per image or video.
    """

    ids: Tensor
    positions: Tensor
    lengths: Tensor
    next_positions: Tensor
    pixel_rows: Tensor | None
    grids: tuple[Grid, ...]
    copies: int
    vision_prompts: int
    """Rows that have an image or a video: what the vision tower is run for."""

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]


def prompt_batch(
    source: TensorSource,
    slots: Sequence[PromptSlot],
    row_width: int,
    copies: int = 1,
    *,
    device: torch.device = HOST,
) -> PromptBatch:
    """Reads `slots` from the inputs segment, which is in host memory; everything is copied out of it, to `device`.

    Args:
        source: tensors over the inputs segment.
        slots: at least one prompt; none may be empty.
        row_width: numbers in a pixel row (`ModelShape.row_width`).
        copies: rows per prompt, media included: 1, or the group size when prefixes are replicated.

    Raises:
        DataError: a prompt without tokens.
    """
    if not slots or copies < 1:
        raise AssertionError(f"a batch needs prompts and copies: {len(slots)} prompts, {copies} copies")
    for slot in slots:
        if slot.tokens == 0:
            raise DataError("a prompt has no tokens", where=f"row {slot.row}", do="Give the row a prompt.")
    longest = max(slot.tokens for slot in slots)
    ids = torch.zeros(len(slots), longest, dtype=torch.int64, device=HOST)
    positions = torch.zeros(3, len(slots), longest, dtype=torch.int64, device=HOST)
    for row, slot in enumerate(slots):
        ids[row, : slot.tokens] = source(slot.ids_offset, (slot.tokens,), torch.int64)
        positions[:, row, : slot.tokens] = source(slot.positions_offset, (3, slot.tokens), torch.int64)
    repeated = [slot for slot in slots for _ in range(copies)]
    media = [m for slot in repeated for m in slot.media]
    pixels = [source(m.offset, (m.rows, row_width), torch.float32) for m in media]
    return PromptBatch(
        ids=ids.repeat_interleave(copies, 0).to(device),
        positions=positions.repeat_interleave(copies, 1).to(device),
        lengths=torch.tensor([slot.tokens for slot in repeated], device=device),
        next_positions=torch.tensor([slot.next_position for slot in repeated], device=device),
        pixel_rows=torch.cat(pixels).to(device) if pixels else None,
        grids=tuple((m.frames, m.height, m.width) for m in media),
        copies=copies,
        vision_prompts=sum(1 for slot in repeated if slot.media),
    )
