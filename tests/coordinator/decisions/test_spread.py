"""The same numbers as the standard library's."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollplex_coordinator.decisions.spread import mean_std

REWARDS = st.floats(-1e6, 1e6, allow_subnormal=False)


@given(st.lists(REWARDS, min_size=2, max_size=20))
@example([0.0, 2.5e-231])
def test_mean_and_sample_deviation_are_those_of_the_standard_library(values: list[float]) -> None:
    mean, std = mean_std(values)
    assert mean == statistics.fmean(values)
    scale = max(map(abs, values))
    assert std == pytest.approx(statistics.stdev(values), rel=1e-9, abs=1e-12 * scale)


@given(REWARDS, st.integers(1, 20))
def test_equal_rewards_have_no_spread_at_all(value: float, count: int) -> None:
    assert mean_std([value] * count)[1] == 0.0
