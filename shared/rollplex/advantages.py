"""Advantages of one group from its rewards.

Owns: the baseline (group mean, or the mean of the others for RLOO), the divisor (spread of the group, of the whole
step, or none) and which samples count. The trainer learns by them, the coordinator writes them down: one formula. Does
not know: tokens, log-probabilities, torch.

Rules that the formulas in papers leave open:

- A sample without a reward (NaN: every reward function abstained) has weight 0. It is in no baseline, no spread, no
  loss and no normaliser. A group without any reward is the case where this holds for all of its samples.
- A group whose rewards are all equal gets advantages of exactly 0.0. The mean of equal numbers need not be that
  number in floating point, so this is decided by comparison, not by subtraction. A group with one reward is such a
  group.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from rollplex.errors import ProtocolError
from rollplex.protocol.trainer import Loss, Scale

Float64s: TypeAlias = npt.NDArray[np.float64]

SPREAD_EPSILON = 1e-4
"""Added to the standard deviation (TRL 1.16, GRPOTrainer)."""


class GroupAdvantages(NamedTuple):
    """Advantages and weights of one group's samples, float64 [G]."""

    values: Float64s
    weights: Float64s
    """1.0 for a sample that counts, 0.0 for one without a reward."""
    spread: bool
    """Whether the rewards that count differ at all."""


def group_advantages(
    rewards: Float64s, *, loss: Loss, scale: Scale, batch_rewards: Float64s | None = None
) -> GroupAdvantages:
    """The advantages of one group.

    Group mean as baseline: A_i = (r_i - mean(r)) / d (DeepSeekMath, arXiv 2402.03300, 4.1.2; Dr.GRPO, arXiv
    2503.20783, 3.2, has d = 1). RLOO: A_i = (r_i - mean of the others' r) / d (arXiv 2402.14740 with
    d = 1; TRL 1.16, RLOOTrainer).
    d is 1, or the standard deviation (n - 1 in the denominator) of the group's or of the whole step's rewards, plus
    `SPREAD_EPSILON`: TRL 1.16's scale_rewards "none", "group", "batch".

    Args:
        rewards: float64 [G]; NaN for a sample without a reward.
        batch_rewards: float64 [samples of the step]; only looked at when `scale` is batch.

    Raises:
        ProtocolError: a reward is infinite, or `scale` is batch and `batch_rewards` is missing or holds fewer than two
            rewards although this group has a spread.
    """
    if np.isinf(rewards).any():
        raise ProtocolError("A reward is infinite", got=str(rewards.tolist()), needed="finite numbers, or NaN for none")
    scored = ~np.isnan(rewards)
    values = np.zeros_like(rewards)
    known = rewards[scored]
    spread = bool(known.size) and bool(known.max() > known.min())
    if spread:
        values[scored] = (known - _baseline(known, loss)) / _divisor(known, scale, batch_rewards)
    return GroupAdvantages(values=values, weights=scored.astype(np.float64), spread=spread)


def _baseline(known: Float64s, loss: Loss) -> Float64s | np.float64:
    if loss is Loss.RLOO:
        others: Float64s = (known.sum() - known) / (known.size - 1)
        return others
    return np.float64(known.mean())


def _divisor(known: Float64s, scale: Scale, batch_rewards: Float64s | None) -> float:
    match scale:
        case Scale.NONE:
            return 1.0
        case Scale.GROUP:
            return standard_deviation(known) + SPREAD_EPSILON
        case Scale.BATCH:
            batch = np.empty(0) if batch_rewards is None else batch_rewards[~np.isnan(batch_rewards)]
            if batch.size < 2:
                raise ProtocolError(
                    "Advantages scaled over the batch need the rewards of the whole step",
                    got=f"{batch.size} rewards",
                    needed="batch_rewards with all samples of the step",
                )
            return standard_deviation(batch) + SPREAD_EPSILON
        case _:
            assert_never(scale)


def standard_deviation(known: Float64s) -> float:
    """Sample standard deviation of rewards without NaN; exactly 0.0 for fewer than two, and if all are equal."""
    return float(known.std(ddof=1)) if known.size > 1 and known.max() > known.min() else 0.0
