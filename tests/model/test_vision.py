"""The vision tower over a batch equals the tower over each image alone, and its tables are made once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.vision_utils import get_vision_window_index

from rollplex.model import vision
from rollplex.model.vision import vision_features, vision_plan

GRIDS = [(1, 4, 6), (1, 4, 4), (3, 2, 4), (1, 10, 6), (1, 4, 4)]


@pytest.mark.parametrize("grids", [GRIDS, GRIDS[1:2] * 3, GRIDS[3:4]])
def test_features_do_not_depend_on_what_else_is_in_the_batch(kit: Any, exact: None, grids: list[Any]) -> None:
    visual = kit.shared_store(dtype="float64").model.model.visual
    stock = kit.stock(dtype="float64").model
    pixels = [torch.randn(t * h * w, 1176, dtype=torch.float64) for t, h, w in grids]
    with torch.no_grad():
        together = vision_features(visual, torch.cat(pixels), grids)
        alone = [vision_features(visual, rows, [grid]) for rows, grid in zip(pixels, grids, strict=True)]
        theirs = [
            stock.get_image_features(rows, torch.tensor([grid])).pooler_output[0]
            for rows, grid in zip(pixels, grids, strict=True)
        ]
    assert torch.allclose(together, torch.cat(alone), rtol=1e-12, atol=1e-12)
    assert torch.allclose(together, torch.cat(theirs), rtol=1e-12, atol=1e-12)


def test_tables_are_made_once_per_combination_of_grids(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    visual = kit.shared_store().model.model.visual
    pixels = torch.randn(24 + 16, 1176)
    vision_plan.cache_clear()
    made: list[Any] = []

    def counted(sizes: Any, **options: Any) -> Any:
        made.append(sizes.tolist())
        return get_vision_window_index(sizes, **options)

    monkeypatch.setattr(vision, "get_vision_window_index", counted)
    with torch.no_grad():
        first = vision_features(visual, pixels, GRIDS[:2])
        second = vision_features(visual, pixels, GRIDS[:2])
        vision_features(visual, pixels[:24], GRIDS[:1])
    assert made == [[list(g) for g in GRIDS[:2]], [list(GRIDS[0])]]
    assert torch.equal(first, second)


def test_equal_sequences_need_no_reordering() -> None:
    plan = vision_plan(((1, 4, 4), (1, 4, 4)), 2, 56, 14, torch.device("cpu"))
    assert plan.full.indices is None
    assert plan.windows.indices is None
    assert plan.full.lengths == plan.windows.lengths == (16,)


def test_windows_of_unequal_length_are_put_back_in_order() -> None:
    plan = vision_plan(((1, 6, 4), (1, 4, 4)), 2, 56, 14, torch.device("cpu"))
    assert plan.windows.lengths == (8, 16)
    assert plan.windows.indices is not None
    assert plan.windows.restore is not None
    order = torch.cat(plan.windows.indices)
    assert torch.equal(order[plan.windows.restore], torch.arange(40))
