"""Largest differences between two ways to compute the same. Pure.

What is not a finite number, on either side, is a difference that passes no tolerance, not even an infinite one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from rollplex.verify.report import GradientDifference, LogprobDifference
from rollplex_coordinator.verify.gradients import Float64s, Gradients

FLOOR: Final = 1e-3
"""Of the largest gradient of all parameters: what a parameter's own largest counts at least, so that one whose
gradients are all rounding does not shout."""


def compare_logprobs(ours: Float64s, theirs: Float64s, lengths: Sequence[int], tolerance: float) -> LogprobDifference:
    """Of all tokens of a group's samples, one sample after the other.

    Args:
        ours, theirs: [sum of lengths].
        lengths: of the samples, at least 1 each.
    """
    if not len(ours) == len(theirs) == sum(lengths):
        raise AssertionError(f"{len(ours)} and {len(theirs)} log-probabilities for {sum(lengths)} tokens")
    finite = np.isfinite(ours) & np.isfinite(theirs)
    apart = np.full(len(ours), np.inf)
    apart[finite] = np.abs(ours[finite] - theirs[finite])
    worst = int(apart.argmax())
    ends = np.cumsum(lengths)
    sample = int(np.searchsorted(ends, worst, side="right"))
    return LogprobDifference(
        largest=_finite(float(apart[worst])),
        tolerance=tolerance,
        sample=sample,
        position=worst - int(ends[sample]) + lengths[sample],
        tokens=len(apart),
        beyond=int((~finite | ~(apart <= tolerance)).sum()),
    )


class _Parameter(Struct, frozen=True, kw_only=True):
    """apart: max |a - b|, inf if a number is not finite. ours, theirs: max |a|, max |b|."""

    name: str
    apart: float
    ours: float
    theirs: float


def compare_gradients(ours: Gradients, theirs: Gradients, tolerance: float) -> GradientDifference:
    """Of all parameters; `theirs` is the truth that differences are relative to."""
    measured = [_measured(name, ours, theirs) for name in theirs.names]
    floor = FLOOR * max((m.theirs for m in measured if math.isfinite(m.theirs)), default=0.0)
    relative = {m.name: _relative(m, floor) for m in measured}
    worst = max(relative, key=lambda name: relative[name], default="")
    return GradientDifference(
        largest=_finite(relative.get(worst, 0.0)),
        tolerance=tolerance,
        parameter=worst,
        parameters=len(measured),
        zero=sum(m.ours == m.theirs == 0.0 for m in measured),
        beyond=sum(not (math.isfinite(value) and value <= tolerance) for value in relative.values()),
    )


def _measured(name: str, ours: Gradients, theirs: Gradients) -> _Parameter:
    apart = a_peak = b_peak = 0.0
    for a, b in zip(ours.blocks(name), theirs.blocks(name), strict=True):
        good = bool(np.isfinite(a).all() and np.isfinite(b).all())
        apart = max(apart, float(np.abs(a - b).max()) if good else math.inf)
        a_peak = max(a_peak, float(np.abs(a).max()) if good else math.inf)
        b_peak = max(b_peak, float(np.abs(b).max()) if good else math.inf)
    return _Parameter(name=name, apart=apart, ours=a_peak, theirs=b_peak)


def _relative(measured: _Parameter, floor: float) -> float:
    if measured.apart == 0.0:
        return 0.0
    scale = max(measured.theirs, floor)
    return measured.apart / scale if scale > 0.0 and math.isfinite(measured.apart) else math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
