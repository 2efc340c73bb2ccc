"""A verification's report in a few lines."""

from __future__ import annotations

import pytest

from rollplex.demo.exactness import exactness_lines
from support.reports import make_report


def test_each_comparison_is_one_line_with_its_largest_differences() -> None:
    assert exactness_lines(make_report()) == [
        "  split against unsplit      log-probabilities within 2e-06, gradients within 3e-06 (57 parameters)",
        "  rollout against trainer    log-probabilities within 1e-06",
    ]


def test_what_does_not_differ_at_all_is_called_equal() -> None:
    assert "log-probabilities equal, gradients within" in exactness_lines(make_report(logprobs=0.0))[0]


@pytest.mark.parametrize(
    ("gradients", "told"), [(0.5, "gradients 0.5 APART, allowed 0.0002"), (None, "NOT FINITE, allowed 0.0002")]
)
def test_what_is_too_far_apart_is_not_called_within(gradients: float | None, told: str) -> None:
    first, second = exactness_lines(make_report(gradients=gradients))
    assert told in first
    assert "log-probabilities within" in first
    assert "within" in second
