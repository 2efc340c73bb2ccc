"""What SGLang's model is made to do with pictures, over a stand-in of it."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollplex.errors import EngineError
from rollplex_rollout.sglang.hooks import PLACE
from rollplex_rollout.sglang.pixels import Place
from rollplex_rollout.sglang.tower import PIXELS, keep_tables, lend


class Model(torch.nn.Module):
    """As SGLang's: joins the items' features."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def get_image_feature(self, items: list[Any]) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("the tower failed")
        return torch.cat([item.feature for item in items])

    def get_video_feature(self, items: list[Any]) -> torch.Tensor:
        return -torch.cat([item.feature for item in items])


class Taken:
    """In place of Pixels."""

    def take(self, place: Place) -> torch.Tensor:
        return torch.full((place.rows,), place.offset)


def items(*places: tuple[int, int]) -> list[Any]:
    return [SimpleNamespace(feature=None, model_specific_data={PLACE: (*place, False)}) for place in places]


def test_the_tower_gets_the_pixels_of_each_place_and_nothing_keeps_them() -> None:
    model, taken = Model(), Taken()
    lend(model, taken)  # type: ignore[arg-type]
    assert getattr(model, PIXELS) is taken
    given = items((3, 2), (5, 1))
    assert model.get_image_feature(given).tolist() == [3, 3, 5]
    assert model.get_video_feature(given).tolist() == [-3, -3, -5]
    assert [item.feature for item in given] == [None, None]
    model.fails = True
    with pytest.raises(RuntimeError, match="the tower failed"):
        model.get_image_feature(given)
    assert [item.feature for item in given] == [None, None]


def test_a_model_that_is_not_known_is_refused() -> None:
    with pytest.raises(EngineError, match="Linear without get_image_feature"):
        lend(torch.nn.Linear(1, 1), Taken())  # type: ignore[arg-type]


class Tower:
    """As SGLang's: makes tables of each size."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def get_window_index(self, grid: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        self.made.append(grid.tolist())
        return grid.sum(1), [0, int(grid.sum())]

    @staticmethod
    @lru_cache(maxsize=8)
    def rot_pos_ids(height: Any, width: Any, merge: int) -> torch.Tensor:
        return torch.tensor([int(height), int(width), merge])


def test_tables_of_a_size_are_made_once() -> None:
    tower: Any = Tower()
    keep_tables(tower)
    grids = torch.tensor([[1, 4, 6], [1, 2, 2]])
    index, ends = tower.get_window_index(grids)
    assert index.tolist() == [11, 5]
    assert ends == [0, 16]
    ends.append(99)  # what a caller does with its own list is no business of the next one
    assert tower.get_window_index(grids.clone())[1] == [0, 16]
    assert tower.made == [grids.tolist()]
    assert tower.get_window_index(grids[:1])[1] == [0, 11]
    for _ in range(3):
        height, width = torch.tensor([4, 6])
        assert tower.rot_pos_ids(height, width, 2).tolist() == [4, 6, 2]
    assert Tower.rot_pos_ids.cache_info()[:2] == (2, 1), "found again though each size is another tensor"


def test_a_tower_without_such_tables_stays_as_it_is() -> None:
    tower = SimpleNamespace()
    keep_tables(tower)
    assert not vars(tower)
