"""Positions of a prompt's tokens for multimodal rotary embedding (mrope), in numpy.

As `Qwen2_5_VLModel.get_rope_index` of transformers 5.24 given mm_token_type_ids: text advances all three rows by one;
the tokens of a medium get (time, row, column) of their grid, time scaled for videos only; what follows goes on after
the larger side of the grid. The response goes on where that function would put further text, in all three rows.

For a video whose temporal positions reach beyond the text behind it, transformers disagrees with itself: its
generation starts at the greatest position + 1, its forward of the whole sequence where the text ended. This is the
second, so that split and whole agree.

Knows nothing of ids or pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from rollplex.data.patches import Grid


class Medium(Struct, frozen=True, kw_only=True):
    """One image or video at its place in a prompt."""

    start: int
    """Index of its first placeholder token after expansion."""
    grid: Grid
    seconds_per_grid: float | None = None
    """Seconds between two temporal patches of a video; None for an image."""


def mrope_positions(
    num_tokens: int, media: Sequence[Medium], *, merge: int, tokens_per_second: int | None
) -> tuple[npt.NDArray[np.int64], int]:
    """Positions of a prompt.

    Args:
        num_tokens: of the whole prompt, placeholders expanded.
        media: in the order of their placeholders.
        merge: merge x merge patches are one token.
        tokens_per_second: temporal positions per second of video (config.json); None: one per temporal patch, whatever
            the seconds, as in Qwen2-VL.

    Returns:
        int64 [3, num_tokens] (temporal, height, width), and the position at which the response goes on.
    """
    positions = np.empty((3, num_tokens), np.int64)
    at, position = 0, 0
    for medium in media:
        text = medium.start - at
        positions[:, at : medium.start] = position + np.arange(text)
        position += text
        high, wide = medium.grid.height // merge, medium.grid.width // merge
        end = medium.start + medium.grid.frames * high * wide
        block = positions[:, medium.start : end].reshape(3, medium.grid.frames, high, wide)
        block[0] = _times(medium, tokens_per_second)[:, None, None] + position
        block[1] = np.arange(high)[None, :, None] + position
        block[2] = np.arange(wide)[None, None, :] + position
        at, position = end, position + max(high, wide)
    positions[:, at:] = position + np.arange(num_tokens - at)
    return positions, position + num_tokens - at


def _times(medium: Medium, tokens_per_second: int | None) -> npt.NDArray[np.int64]:
    """Temporal positions of the frames; float32 and cut off, as torch computes them."""
    frames = np.arange(medium.grid.frames)
    if medium.seconds_per_grid is None or tokens_per_second is None:
        return frames
    interval = np.float32(tokens_per_second) * np.float32(medium.seconds_per_grid)
    return (frames.astype(np.float32) * interval).astype(np.int64)
