"""Which pictures, of which sizes, the rows of a workload have. Pure.

    plain    one picture, as square as its tokens allow
    mixed    in turn: a square one, a wide one, a tall one, a wide one with a tall one, four square ones
    video    one video of so many frames

Sizes are in tokens: columns and rows of merged patches.
"""

from __future__ import annotations

import math
from typing import Final

from msgspec import Struct

Size = tuple[int, int]
"""Columns and rows."""
OVERHEAD: Final = 40
"""Tokens of a prompt that are kept for words, where it is to be of vision tokens mostly."""
_WIDE, _TALL, _LANDSCAPE = 2.0, 1 / 3, 1.5


class Layout(Struct, frozen=True, kw_only=True):
    """The media of one row: pictures, or the frames of one video, which are of one size."""

    sizes: tuple[Size, ...]
    video: bool = False


def mixed_layouts(vision_tokens: int) -> tuple[Layout, ...]:
    """Five rows of nearly so many vision tokens each, never more; from 64 on they differ as they should."""
    v = vision_tokens
    return (
        Layout(sizes=(near(v),)),
        Layout(sizes=(near(v, _WIDE),)),
        Layout(sizes=(near(v, _TALL),)),
        Layout(sizes=(near(2 * v // 3, _LANDSCAPE), near(v // 3, _TALL))),
        Layout(sizes=(near(v // 4),) * 4),
    )


def video_layout(vision_tokens: int, frames: int, temporal_patch: int) -> Layout:
    """A video of nearly so many vision tokens, never more: frames share tokens in groups of `temporal_patch`."""
    groups = -(-frames // temporal_patch)
    return Layout(sizes=(near(vision_tokens // groups, _LANDSCAPE),) * frames, video=True)


def near(tokens: int, ratio: float = 1.0) -> Size:
    """The size of at most so many tokens whose columns are about `ratio` times its rows."""
    rows = max(1, math.isqrt(max(1, int(tokens / ratio))))
    return max(1, tokens // rows), rows


def mostly_vision(prompt_tokens: int) -> int:
    """Vision tokens of a prompt of so many in all, such that a nearly square picture has just so many; at least 4."""
    size = near(max(4, prompt_tokens - OVERHEAD))
    return size[0] * size[1]
