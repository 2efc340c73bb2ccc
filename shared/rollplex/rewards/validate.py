"""What a reward function may return, and what becomes of it. Pure.

    returned                                   counts as
    list or tuple, or an array with tolist     one entry for each completion
    int, float, numpy or torch scalar          that reward
    None                                       abstains for this completion
    bool, text, anything else                  wrong type
    NaN, infinite, beyond 1e18                 not finite (its square leaves float32)

Nothing is ever replaced by 0.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

from msgspec import Struct

from rollplex.protocol.reward import RewardProblem

MAX_REWARD = 1e18


class Finding(Struct, frozen=True, kw_only=True):
    """Why what a function returned cannot be used."""

    problem: RewardProblem
    detail: str


def check(returned: object, count: int) -> list[float | None] | Finding:
    """Check what a function returned for `count` completions."""
    values = _listed(returned)
    if values is None:
        return Finding(
            problem=RewardProblem.WRONG_TYPE, detail=f"{_shown(returned)} instead of a list of {count} numbers"
        )
    if len(values) != count:
        detail = f"{_counted(len(values), 'reward')} for {_counted(count, 'completion')}"
        return Finding(problem=RewardProblem.WRONG_COUNT, detail=detail)
    rewards: list[float | None] = []
    for sample, value in enumerate(values):
        reward = _number(value)
        if isinstance(reward, Finding):
            return Finding(problem=reward.problem, detail=f"sample {sample}: {reward.detail}")
        rewards.append(reward)
    return rewards


def weighted_sum(by_function: Sequence[Sequence[float | None]], weights: Sequence[float]) -> list[float]:
    """Rewards of a group: for each sample the weighted sum over the functions that did not abstain, in their order.

    A function of weight 0 takes no part. A sample for which every function with a weight abstains gets NaN.

    Args:
        by_function: [functions][samples].
        weights: [functions].
    """
    rewards: list[float] = []
    for values in zip(*by_function, strict=True):
        terms = [w * v for w, v in zip(weights, values, strict=True) if v is not None and w != 0.0]
        rewards.append(sum(terms) if terms else math.nan)
    return rewards


def _listed(returned: object) -> Sequence[object] | None:
    if isinstance(returned, list | tuple):
        return returned
    convert = getattr(returned, "tolist", None)
    values = convert() if callable(convert) else None
    return values if isinstance(values, list) else None


def _number(value: object) -> float | Finding | None:
    if value is None:
        return None
    scalar = getattr(value, "item", None)
    if callable(scalar) and getattr(value, "shape", None) == ():  # numpy's and torch's scalars
        value = scalar()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return Finding(problem=RewardProblem.WRONG_TYPE, detail=_shown(value))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= MAX_REWARD:
        return Finding(problem=RewardProblem.NOT_FINITE, detail=f"{number!r}, not between -1e18 and 1e18")
    return number


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _shown(value: object) -> str:
    look = repr(value)
    return f"{type(value).__name__} {look if len(look) <= 80 else look[:77] + '…'}"
