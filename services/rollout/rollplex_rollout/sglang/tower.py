"""What is changed of SGLang's model for pictures, for SGLang 0.5.17.

Owns: the way from a picture's place to the vision tower, and tables that depend on the sizes of pictures alone, which
SGLang makes anew for each. Changes one model object, none of SGLang's classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import torch

from rollplex.errors import EngineError
from rollplex_rollout.sglang.hooks import PLACE
from rollplex_rollout.sglang.pixels import Pixels, Place

PIXELS: Final = "rollplex_pixels"
"""Attribute of the model, by which the scheduler finds them."""
_SIZES: Final = 256
"""Of pictures whose tables are kept: some hundred kilobytes each."""


def lend(model: Any, pixels: Pixels) -> None:
    """Let the model take its pictures from `pixels`.

    Raises:
        EngineError: SGLang's model is not built as that of 0.5.17 is.
    """
    for name in ("get_image_feature", "get_video_feature"):
        setattr(model, name, _with_pixels(_known(model, name), pixels))
    setattr(model, PIXELS, pixels)


def keep_tables(tower: Any) -> None:
    """Make the tables of each size of picture once, in the tower of a Qwen2.5-VL; others have none of them."""
    if hasattr(tower, "get_window_index"):
        tower.get_window_index = _windows_kept(tower.get_window_index)
    if hasattr(tower, "rot_pos_ids"):
        tower.rot_pos_ids = _by_numbers(tower.rot_pos_ids)


def _known(owner: Any, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(owner, name, None)
    if found is None:
        raise EngineError(
            "SGLang's model is not known", got=f"{type(owner).__name__} without {name}", needed="SGLang 0.5.17"
        )
    return found


def _with_pixels(feature: Callable[[list[Any]], Any], pixels: Pixels) -> Callable[[list[Any]], Any]:
    """The tower over items (MultimodalDataItem) that come without pixels and keep none: SGLang would copy them back to
    the host, one pinned block for each prompt that runs."""

    def encoded(items: list[Any]) -> Any:
        try:
            for item in items:
                item.feature = pixels.take(Place(*item.model_specific_data[PLACE]))
            return feature(items)
        finally:
            for item in items:
                item.feature = None

    return encoded


def _windows_kept(original: Callable[[Any], tuple[torch.Tensor, list[int]]]) -> Callable[[Any], Any]:
    """`get_window_index` by what the grid says. Who calls it changes neither of its answers."""

    @lru_cache(maxsize=_SIZES)
    def of(grid: tuple[tuple[int, ...], ...]) -> tuple[torch.Tensor, tuple[int, ...]]:
        index, ends = original(torch.tensor(grid))
        return index, tuple(ends)

    def windows(grid_thw: Any) -> tuple[torch.Tensor, list[int]]:
        index, ends = of(tuple(tuple(row) for row in grid_thw.tolist()))
        return index, list(ends)

    return windows


def _by_numbers(original: Callable[[int, int, int], Any]) -> Callable[[Any, Any, int], Any]:
    """`rot_pos_ids` keeps its answers by its arguments, which are tensors: none is ever found again, and all stay."""

    def ids(height: Any, width: Any, merge: int) -> Any:
        return original(int(height), int(width), merge)

    return ids
