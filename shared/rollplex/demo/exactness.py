"""A verification's report in a few lines. Does not run it."""

from __future__ import annotations

from typing import Final

from rollplex.verify.report import Comparison, GradientDifference, LogprobDifference, Report

_NAME: Final = 26
"""Columns of a comparison's name."""


def heading() -> list[str]:
    """Before the verification, which takes some seconds."""
    return ["", "Exactness: one group of answers, computed in other ways with the trained weights (some seconds)", ""]


def exactness_lines(report: Report) -> list[str]:
    """One line for each comparison: how far apart its two ways lie."""
    return [f"  {comparison.name:<{_NAME}} {_difference(comparison)}" for comparison in report.comparisons]


def _difference(comparison: Comparison) -> str:
    parts = []
    if comparison.logprobs is not None:
        parts.append(f"log-probabilities {_within(comparison.logprobs)}")
    if comparison.gradients is not None:
        parts.append(f"gradients {_within(comparison.gradients)} ({comparison.gradients.parameters} parameters)")
    return ", ".join(parts)


def _within(found: LogprobDifference | GradientDifference) -> str:
    if found.passed and found.largest is not None:
        return f"within {found.largest:.1g}" if found.largest else "equal"
    apart = "not finite" if found.largest is None else f"{found.largest:.1g} apart"
    return f"{apart.upper()}, allowed {found.tolerance:.1g}"
