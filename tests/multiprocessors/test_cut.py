"""Where a device is cut: two processes that know only their own share never overlap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex.errors import ConfigError
from rollplex.multiprocessors.cut import Side, cut, grain

shares = st.floats(0.001, 0.999)


@pytest.mark.parametrize(
    ("total", "share", "side", "first"),
    [
        (132, 0.36, Side.FIRST, 48),
        (132, 0.64, Side.LAST, 48),
        (132, 0.5, Side.FIRST, 64),
        (132, 0.5, Side.LAST, 64),
        (132, 0.01, Side.FIRST, 8),
        (132, 0.01, Side.LAST, 120),
        (132, 0.999, Side.FIRST, 120),
        (144, 0.999, Side.FIRST, 136),
    ],
)
def test_a_share_becomes_the_nearest_cut_that_is_possible(total: int, share: float, side: Side, first: int) -> None:
    assert cut(total, share, side, grain=8) == first


@given(decode=shares, rest=st.floats(0.0, 1.0), total=st.integers(16, 300), each=st.sampled_from([2, 4, 8]))
def test_shares_of_at_most_one_together_are_disjoint(decode: float, rest: float, total: int, each: int) -> None:
    prefix = (1.0 - decode) * rest
    if not 0.0 < prefix < 1.0:
        return
    first = cut(total, decode, Side.FIRST, grain=each)
    other = cut(total, prefix, Side.LAST, grain=each)
    assert first <= other
    assert first % each == other % each == 0
    assert min(first, total - other) >= each


@given(thousandths=st.integers(1, 999), total=st.integers(16, 300))
def test_shares_of_exactly_one_together_leave_no_multiprocessor_out(thousandths: int, total: int) -> None:
    decode, prefix = thousandths / 1000, round(1.0 - thousandths / 1000, 3)
    assert cut(total, decode, Side.FIRST, grain=8) == cut(total, prefix, Side.LAST, grain=8)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, float("nan")])
def test_a_share_that_is_no_part_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="0 < share < 1"):
        cut(132, share, Side.FIRST, grain=8)


def test_a_device_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 16"):
        cut(15, 0.5, Side.FIRST, grain=8)


@pytest.mark.parametrize(("major", "together"), [(7, 2), (8, 4), (9, 8), (10, 8)])
def test_the_grain_is_the_architectures(major: int, together: int) -> None:
    assert grain(major) == together
