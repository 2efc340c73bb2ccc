"""What reward functions may return."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from rollplex.protocol.reward import RewardProblem
from rollplex.rewards.validate import MAX_NAME_CHARS, MAX_PARTS, Finding, bounded, check, take_parts, weighted_sum


@pytest.mark.parametrize(
    ("returned", "wanted"),
    [
        ([1, 0.5, None], [1.0, 0.5, None]),
        ((0, -3, 1e18), [0.0, -3.0, 1e18]),
        (np.array([1, 2, 3]), [1.0, 2.0, 3.0]),
        (torch.tensor([0.5, 1.0, 2.0]), [0.5, 1.0, 2.0]),
        ([np.float32(0.5), np.int64(2), torch.tensor(3)], [0.5, 2.0, 3.0]),
        ([Fraction(1, 4), np.array(1.5), 0], [0.25, 1.5, 0.0]),
        ([None, None, None], [None, None, None]),
    ],
)
def test_numbers_and_abstentions_are_taken(returned: object, wanted: list[float | None]) -> None:
    assert check(returned, 3) == wanted


@pytest.mark.parametrize(
    ("returned", "problem", "says"),
    [
        ([1.0], "wrong_count", "1 reward for 3 completions"),
        ([1.0] * 4, "wrong_count", "4 rewards"),
        ([], "wrong_count", "0 rewards"),
        (None, "wrong_type", "NoneType None"),
        (1.0, "wrong_type", "float 1.0"),
        ("abc", "wrong_type", "str 'abc'"),
        (b"abc", "wrong_type", "bytes"),
        ({1, 2, 3}, "wrong_type", "set"),
        ({"a": 1, "b": 2, "c": 3}, "wrong_type", "dict"),
        ((x for x in range(3)), "wrong_type", "generator"),
        (torch.tensor(1.0), "wrong_type", "Tensor"),
        ([0, "1", 0], "wrong_type", "sample 1: str '1'"),
        ([0, 0, True], "wrong_type", "sample 2: bool True; float(…) makes 1.0 or 0.0 of it, if that is meant"),
        ([np.True_, 0, 0], "wrong_type", "sample 0: bool True"),
        ([torch.tensor(True), 0, 0], "wrong_type", "sample 0: bool True"),
        ([0, [1], 0], "wrong_type", "sample 1: list"),
        (np.ones((3, 2)), "wrong_type", "sample 0: list"),
        ([0, 1j, 0], "wrong_type", "complex"),
        ([0, math.nan, 0], "not_finite", "sample 1: nan"),
        ([0, 0, -math.inf], "not_finite", "sample 2: -inf"),
        ([np.float32("nan"), 0, 0], "not_finite", "sample 0: nan"),
        ([1e30, 0, 0], "not_finite", "sample 0: 1e+30"),
        ([10**400, 0, 0], "not_finite", "sample 0: inf"),
    ],
)
def test_anything_else_is_a_finding_and_never_a_zero(returned: Any, problem: str, says: str) -> None:
    finding = check(returned, 3)
    assert isinstance(finding, Finding)
    assert finding.problem is RewardProblem(problem)
    assert says in finding.detail


def test_dicts_are_split_into_the_reward_and_finite_numbers() -> None:
    returned = [
        {"score": 1, "acc": True, "pred": "7", "iou": np.float32(0.5), "list": [1]},
        {"acc": np.False_, "score": None, "iou": math.nan},
        0.25,
        {"acc": 1.0},
    ]
    rewards, parts = take_parts(returned, "score")
    assert rewards == [1, None, 0.25, {"acc": 1.0}]
    assert parts == {"acc": [1.0, 0.0, 1.0], "iou": [0.5]}
    assert isinstance(check(rewards, 4), Finding)
    assert take_parts("text", "score") == ("text", {})


def test_parts_are_bounded_in_number_and_name() -> None:
    parts = bounded({f"{n:03}" + "x" * 100: [1.0] for n in range(100)})
    assert len(parts) == MAX_PARTS
    assert {len(name) for name in parts} == {MAX_NAME_CHARS}


def test_rewards_are_weighted_sums_over_those_that_do_not_abstain() -> None:
    values: list[list[float | None]] = [[1.0, None, 2.0, None], [0.5, 0.25, None, None], [100.0, 100.0, 100.0, 100.0]]
    rewards = weighted_sum(values, [2.0, -1.0, 0.0])
    assert rewards[:3] == [1.5, -0.25, 4.0]
    assert math.isnan(rewards[3])
