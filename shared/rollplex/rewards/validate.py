"""What a reward function may return, and what becomes of it. Pure.

    returned                                   counts as
    list or tuple, or an array with tolist     one entry for each completion
    int, float, numpy or torch scalar          that reward
    None                                       abstains for this completion
    bool, text, anything else                  wrong type
    NaN, infinite, beyond 1e18                 not finite (its square leaves float32)

In verl's and EasyR1's form an entry may also be a dict, with the reward under a fixed key. Its other numbers, bools
among them, are parts: reported, not learned from; those that are not finite, and what is no number, are left out.

Nothing is ever replaced by 0.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence

from msgspec import Struct

from rollplex.protocol.reward import RewardProblem

MAX_REWARD = 1e18
MAX_PARTS = 64
"""Of one function; the first so many count."""
MAX_NAME_CHARS = 64


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


def take_parts(returned: object, key: str) -> tuple[object, dict[str, list[float]]]:
    """Split entries that are dicts into the reward and the other numbers.

    Args:
        returned: by a function in verl's or EasyR1's form.
        key: under which a dict has the reward.

    Returns:
        What `check` is to check, and the other numbers by name, in the order of the samples that have them. A dict
        without the key is left as it is, for `check` to find.
    """
    values = _listed(returned)
    if values is None:
        return returned, {}
    parts: dict[str, list[float]] = {}
    rewards = [value[key] if isinstance(value, Mapping) and key in value else value for value in values]
    for value in values:
        for name, item in value.items() if isinstance(value, Mapping) else ():
            number = _part(item)
            if name != key and number is not None:
                parts.setdefault(str(name), []).append(number)
    return rewards, parts


def bounded(parts: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """At most `MAX_PARTS` parts, with names that are not too long."""
    return {name[:MAX_NAME_CHARS]: values for name, values in list(parts.items())[:MAX_PARTS]}


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
    value = _unwrapped(value)
    if isinstance(value, bool):
        detail = f"{_shown(value)}; float(…) makes 1.0 or 0.0 of it, if that is meant"
        return Finding(problem=RewardProblem.WRONG_TYPE, detail=detail)
    if not isinstance(value, numbers.Real):
        return Finding(problem=RewardProblem.WRONG_TYPE, detail=_shown(value))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= MAX_REWARD:
        return Finding(problem=RewardProblem.NOT_FINITE, detail=f"{number!r}, not between -1e18 and 1e18")
    return number


def _part(value: object) -> float | None:
    plain = _unwrapped(value)
    number = _number(float(plain) if isinstance(plain, bool) else plain)
    return number if isinstance(number, float) else None


def _unwrapped(value: object) -> object:
    """The number in a scalar of numpy or torch."""
    scalar = getattr(value, "item", None)
    return scalar() if callable(scalar) and getattr(value, "shape", None) == () else value


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _shown(value: object) -> str:
    look = repr(value)
    return f"{type(value).__name__} {look if len(look) <= 80 else look[:77] + '…'}"
