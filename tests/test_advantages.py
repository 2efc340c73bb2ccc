"""Advantages: baselines, divisors, groups without spread, samples without a reward."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rollplex.advantages import Float64s, GroupAdvantages, group_advantages, standard_deviation
from rollplex.errors import ProtocolError
from rollplex.protocol.trainer import Loss, Scale

GROUP = [0.0, 1.0, 0.25, 1.0]
BATCH = [0.0, 1.0, 0.25, 1.0, 3.0, 3.0, 3.0, 3.0]


def advantages(
    rewards: list[float], loss: Loss = Loss.GRPO, scale: Scale = Scale.NONE, batch: list[float] | None = None
) -> GroupAdvantages:
    every: Float64s | None = None if batch is None else np.array(batch)
    return group_advantages(np.array(rewards), loss=loss, scale=scale, batch_rewards=every)


def plain_std(rewards: list[float]) -> float:
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))


@pytest.mark.parametrize(
    ("scale", "divisor"),
    [(Scale.NONE, 1.0), (Scale.GROUP, plain_std(GROUP) + 1e-4), (Scale.BATCH, plain_std(BATCH) + 1e-4)],
)
def test_rewards_less_the_group_mean_are_divided_by_the_chosen_spread(scale: Scale, divisor: float) -> None:
    got = advantages(GROUP, scale=scale, batch=BATCH)
    mean = sum(GROUP) / 4
    assert got.values.tolist() == pytest.approx([(r - mean) / divisor for r in GROUP], rel=1e-14)
    assert got.weights.tolist() == [1.0] * 4
    assert got.spread


def test_rloo_compares_each_sample_with_the_mean_of_the_others() -> None:
    got = advantages(GROUP, loss=Loss.RLOO)
    others = [sum(r for j, r in enumerate(GROUP) if j != i) / 3 for i in range(4)]
    assert got.values.tolist() == pytest.approx([r - o for r, o in zip(GROUP, others, strict=True)], rel=1e-14)


@pytest.mark.parametrize("loss", [Loss.GRPO, Loss.RLOO])
@pytest.mark.parametrize("scale", list(Scale))
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.7, 1e30])
@pytest.mark.parametrize("size", [2, 3, 7, 10])
def test_a_group_without_spread_gets_exactly_0(loss: Loss, scale: Scale, reward: float, size: int) -> None:
    got = advantages([reward] * size, loss, scale, batch=[*[reward] * size, 0.0, 1.0])
    assert got.values.tolist() == [0.0] * size
    assert got.weights.tolist() == [1.0] * size
    assert not got.spread


@pytest.mark.parametrize("reward", [0.1, 0.9, 1e8 + 0.1, -1e18])
def test_equal_rewards_have_a_spread_of_exactly_0(reward: float) -> None:
    assert [standard_deviation(np.full(size, reward)) for size in range(12)] == [0.0] * 12


def test_a_small_spread_on_large_rewards_is_not_lost() -> None:
    """To float32 these four are one number."""
    rewards = [1e8, 1e8 + 0.1, 1e8 + 0.2, 1e8 + 0.3]
    got = advantages(rewards, scale=Scale.GROUP)
    small = advantages([0.0, 0.1, 0.2, 0.3], scale=Scale.GROUP)
    assert got.values.tolist() == pytest.approx(small.values.tolist(), rel=1e-6)
    assert len(set(np.asarray(rewards, np.float32).tolist())) == 1


def test_equal_numbers_can_have_another_mean_so_subtraction_alone_would_not_give_0() -> None:
    assert any(np.full(n, 0.1).mean() != 0.1 for n in range(2, 12))


@pytest.mark.parametrize("loss", [Loss.GRPO, Loss.RLOO])
@pytest.mark.parametrize("scale", list(Scale))
def test_a_sample_without_reward_weighs_nothing_and_moves_no_other(loss: Loss, scale: Scale) -> None:
    with_gap = advantages([0.0, math.nan, 1.0, 0.25], loss, scale, batch=[0.0, math.nan, 1.0, 0.25, 2.0])
    alone = advantages([0.0, 1.0, 0.25], loss, scale, batch=[0.0, 1.0, 0.25, 2.0])
    assert with_gap.weights.tolist() == [1.0, 0.0, 1.0, 1.0]
    assert with_gap.values[1] == 0.0
    assert np.array_equal(with_gap.values[[0, 2, 3]], alone.values)


@pytest.mark.parametrize("scale", list(Scale))
def test_a_group_without_rewards_is_skipped_whole(scale: Scale) -> None:
    got = advantages([math.nan] * 4, scale=scale, batch=[math.nan] * 8)
    assert got.weights.tolist() == [0.0] * 4
    assert got.values.tolist() == [0.0] * 4
    assert not got.spread


def test_one_reward_among_missing_ones_is_a_group_without_spread() -> None:
    got = advantages([math.nan, 0.7, math.nan], loss=Loss.RLOO, scale=Scale.GROUP)
    assert got.weights.tolist() == [0.0, 1.0, 0.0]
    assert got.values.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("reward", [math.inf, -math.inf])
def test_an_infinite_reward_is_refused(reward: float) -> None:
    with pytest.raises(ProtocolError, match="infinite"):
        advantages([0.0, reward])


@pytest.mark.parametrize("batch", [None, [], [1.0, math.nan]])
def test_batch_scaling_without_the_batch_is_refused(batch: list[float] | None) -> None:
    with pytest.raises(ProtocolError, match="whole step"):
        advantages(GROUP, scale=Scale.BATCH, batch=batch)
