"""Rows that the input child has checked, for sizes from shapes: prompts of some tokens with pictures."""

from __future__ import annotations

from collections.abc import Sequence

from rollplex.config import Config
from rollplex.protocol.common import MediaSlot, PromptSlot
from rollplex.protocol.inputs import DataChecked, SourceChecked
from support.workers import ROW_WIDTH

Grid = tuple[int, int, int]
Drawn = tuple[int, Sequence[Grid]]
"""Text tokens and media of a row."""


def slot(group: int, row: Drawn) -> PromptSlot:
    text, grids = row
    return PromptSlot(
        group=group,
        row=group,
        tokens=text + sum(2 + t * h * w // 4 for t, h, w in grids),
        ids_offset=0,
        positions_offset=0,
        next_position=1,
        media=tuple(MediaSlot(offset=0, frames=t, height=h, width=w) for t, h, w in grids),
    )


def checked(rows: Sequence[Drawn], name: str) -> SourceChecked:
    """What the input child finds in these rows."""
    slots = [slot(0, row) for row in rows]
    return SourceChecked(
        name=name,
        fingerprint="f",
        num_rows=len(rows),
        good_rows=None,
        rejected=(),
        max_prompt_tokens=max(s.tokens for s in slots),
        max_media_rows=max(s.media_rows for s in slots),
        max_media_tokens=max(s.media_rows // 4 for s in slots),
    )


def data_of(*sources: SourceChecked) -> DataChecked:
    return DataChecked(cause=1, sources=sources, never_sampled=(), stop_ids=(), row_width=ROW_WIDTH)


def uniform(config: Config, tokens: int, media_rows: int) -> tuple[list[PromptSlot], DataChecked]:
    """An iteration of equal prompts with one square-ish image each, and the data that has only those."""
    row: Drawn = (tokens - 2 - media_rows // 4, [(1, 2, media_rows // 2)])
    return [slot(g, row) for g in range(config.data.prompts_per_iteration)], data_of(checked([row], "train"))
