"""Which candidate is taken. Pure.

    cost      seconds of the rollout with prefix work beside it, and of the prefix work that was left, done alone
    ratio     (rollout alone + prefix work alone) / cost: the window ratio; above 1 is gain

Prefix work that found no memory during the rollout costs the same under every candidate, so it is counted by its part
of the work and not by when it was done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from rollplex.tune.candidates import WHOLE, Candidate

LEAST_NOISE: Final = 0.01
"""Part of the cost by which two candidates must differ in any case."""


class Alone(Struct, frozen=True, kw_only=True):
    """Seconds of one iteration with nothing beside: medians of serial."""

    rollout_s: float
    prefix_s: float
    spread: float = 0.0
    """Of the rollout over the repeats, as a part of the median."""


class Measured(Struct, frozen=True, kw_only=True):
    """One candidate."""

    candidate: Candidate
    rollout_s: float
    """With prefix work beside it; median."""
    hidden: float
    """Part of the prefix work that was done meanwhile."""
    iteration_s: float
    """The whole iteration; median."""
    spread: float = 0.0
    """Of `rollout_s` over the repeats, as a part of the median."""

    def cost_s(self, alone: Alone) -> float:
        return self.rollout_s + (1.0 - self.hidden) * alone.prefix_s

    def ratio(self, alone: Alone) -> float:
        return (alone.rollout_s + alone.prefix_s) / self.cost_s(alone)


class Choice(Struct, frozen=True, kw_only=True):
    """What was taken."""

    taken: Candidate
    ratio: float
    noise: float
    """Part of the cost within which candidates count as equal."""
    gains: bool
    """Whether work beside the rollout pays at all, by more than the noise."""


def choose(alone: Alone, measured: Sequence[Measured]) -> Choice:
    """The smallest change among those that are as good as the best: within what repeats differ by. A limit that wins
    nothing may cost something on a day with other lengths.

    Args:
        measured: at least one; those with time slices among them are never taken, as no share makes them.
    """
    able = [one for one in measured if one.candidate.sharing != "turns"]
    assert able, "the whole device is always measured"
    noise = max(LEAST_NOISE, alone.spread, *(one.spread for one in able))
    best_s = min(one.cost_s(alone) for one in able)
    near = [one for one in able if one.cost_s(alone) <= best_s * (1.0 + noise)]
    taken = min(near, key=lambda one: (one.candidate.change, one.cost_s(alone)))
    ratio = taken.ratio(alone)
    return Choice(taken=taken.candidate, ratio=ratio, noise=noise, gains=ratio > 1.0 + noise)


def turns_only() -> Choice:
    """Where nothing can run at the same time."""
    return Choice(taken=WHOLE, ratio=1.0, noise=0.0, gains=False)
