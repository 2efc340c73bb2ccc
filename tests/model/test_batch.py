"""Prompts out of the inputs segment, padded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollplex.errors import DataError
from rollplex.model.batch import prompt_batch
from rollplex.protocol.common import PromptSlot


def test_prompts_are_padded_on_the_right_and_media_come_in_order(kit: Any) -> None:
    samples = [
        kit.sample([4], 0),
        kit.sample([1, ("image", (1, 4, 6)), ("video", (2, 2, 4), 1.0), 3], 1),
        kit.sample([2, ("image", (1, 2, 2))], 2),
    ]
    batch = kit.batch(samples)
    assert (batch.rows, batch.tokens) == (3, len(samples[1].ids))
    for row, sample in enumerate(samples):
        real = len(sample.ids)
        assert torch.equal(batch.ids[row, :real], sample.ids)
        assert torch.equal(batch.positions[:, row, :real], sample.positions)
        assert not batch.ids[row, real:].any()
        assert not batch.positions[:, row, real:].any()
    assert batch.lengths.tolist() == [len(s.ids) for s in samples]
    assert batch.next_positions.tolist() == [s.next_position for s in samples]
    assert batch.grids == ((1, 4, 6), (2, 2, 4), (1, 2, 2))
    assert torch.equal(batch.pixel_rows, torch.cat([p for s in samples for p in s.pixels]))
    assert batch.vision_prompts == 2


def test_copies_lie_beside_their_prompt_with_media_of_their_own(kit: Any) -> None:
    samples = [kit.sample([1, ("image", (1, 4, 4)), 3], 1), kit.sample([4], 0)]
    once, twice = kit.batch(samples), kit.batch(samples, 2)
    assert torch.equal(twice.ids, once.ids[[0, 0, 1, 1]])
    assert torch.equal(twice.positions, once.positions[:, [0, 0, 1, 1]])
    assert twice.lengths.tolist() == [10, 10, 4, 4]
    assert twice.next_positions.tolist() == once.next_positions[[0, 0, 1, 1]].tolist()
    assert torch.equal(twice.pixel_rows, torch.cat([once.pixel_rows, once.pixel_rows]))
    assert (twice.vision_prompts, twice.grids) == (2, once.grids * 2)


def test_text_alone_has_no_pixel_rows(kit: Any) -> None:
    batch = kit.batch([kit.sample([4], 0)])
    assert batch.pixel_rows is None
    assert batch.grids == ()


def test_a_prompt_without_tokens_is_refused() -> None:
    slot = PromptSlot(group=0, row=17, tokens=0, ids_offset=0, positions_offset=0, next_position=0)
    with pytest.raises(DataError, match="row 17: a prompt has no tokens"):
        prompt_batch(lambda *_: torch.empty(0), [slot], 1176)


def test_the_batch_keeps_nothing_of_the_segment(kit: Any) -> None:
    held = torch.zeros(64, dtype=torch.int64)

    def source(offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return held[: torch.Size(shape).numel()].view(shape).view(dtype) if dtype is torch.int64 else torch.empty(0)

    slot = PromptSlot(group=0, row=0, tokens=3, ids_offset=0, positions_offset=0, next_position=3)
    batch = prompt_batch(source, [slot], 1176)
    held += 1
    assert not batch.ids.any()
    assert not batch.positions.any()
