"""Impossible layouts, and the arithmetic in their errors."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from rollplex.errors import ConfigError
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.refusals import check
from rollplex.layout.published import QWEN2_5_VL
from rollplex.layout.shape import ModelShape
from support.slices import DEGREES, small_shape


def refusal(shape: ModelShape, training: int, rollout: int, *, devices: int = 8, whole_tower: bool = False) -> str:
    try:
        check(
            shape,
            TrainingLayout(degree=training, vision_sharded=not whole_tower),
            RolloutLayout(degree=rollout, vision_sharded=not whole_tower),
            devices=devices,
        )
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("size", ["3B", "32B", "72B"])
def test_every_pair_of_degrees_is_possible_but_for_the_7b(size: str) -> None:
    assert {refusal(QWEN2_5_VL[size], *pair) for pair in product(DEGREES, DEGREES)} == {""}


def test_the_28_heads_of_the_7b_allow_one_two_and_four() -> None:
    shape = QWEN2_5_VL["7B"]
    assert {refusal(shape, *pair) for pair in product((1, 2, 4), (1, 2, 4))} == {""}
    assert "rollout: " in refusal(shape, 4, 8)
    assert "got 28 attention heads / 8 = 3.5; needed a whole number" in refusal(shape, 4, 8)
    assert "training: " in refusal(shape, 8, 4)


@pytest.mark.parametrize(
    ("training", "rollout", "devices", "message"),
    [
        (2, 3, 6, "do not nest.* got training 2, rollout 3: 3 = 1 x 2 \\+ 1; needed the larger a multiple"),
        (6, 4, 12, "6 = 1 x 4 \\+ 2"),
        (8, 1, 4, "4 devices for training 8 and rollout 1: 4 = 0 x 8 \\+ 4; needed at least 8 devices"),
        (1, 4, 6, "6 = 1 x 4 \\+ 2; needed a multiple of 4 devices"),
        (0, 1, 8, "training: A tensor-parallel degree is less than one; got 0"),
        (1, -2, 8, "rollout: .* got -2"),
    ],
)
def test_degrees_that_do_not_fit_each_other_or_the_devices(
    training: int, rollout: int, devices: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(small_shape(), TrainingLayout(degree=training), RolloutLayout(degree=rollout), devices=devices)


@pytest.mark.parametrize(
    ("change", "degree", "message"),
    [
        ({"kv_heads": 4, "heads": 24}, 6, "6 ranks, for each of which there must be one K/V head, / 4 = 1.5"),
        ({"kv_heads": 6, "heads": 24}, 4, "6 K/V heads / 4 = 1.5"),
        ({"intermediate": 20}, 8, "20 columns of the MLP (intermediate_size) / 8 = 2.5"),
        ({"heads": 9, "kv_heads": 3, "intermediate": 9}, 3, "128 rows of the padded vocabulary / 3"),
        ({"kv_heads": 1, "head_dim": 4}, 8, "got 4 rows of K and V / 8 = 0.5"),
    ],
)  # fmt: skip
def test_what_the_text_model_cannot_be_split_by(change: dict[str, int], degree: int, message: str) -> None:
    assert message in refusal(small_shape(**change), degree, degree, devices=degree)


def test_what_the_vision_tower_cannot_be_split_by_is_no_matter_where_it_stays_whole() -> None:
    shape = small_shape()
    six = replace(shape, vision=replace(shape.vision, heads=6, hidden=24))
    assert "got 6 attention heads of the vision tower / 4 = 1.5" in refusal(six, 4, 4)
    assert not refusal(six, 4, 4, whole_tower=True)
    odd = replace(shape, vision=replace(shape.vision, architecture="qwen2_vl", intermediate=20))
    assert "got 20 columns of the vision MLP as stored / 8 = 2.5" in refusal(odd, 8, 1)
    narrow = replace(shape, vision=replace(shape.vision, merge=1, hidden=36, heads=8))
    assert "got 36 columns of the vision tower's merger / 8 = 4.5" in refusal(narrow, 1, 8)
