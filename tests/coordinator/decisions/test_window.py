"""Who keeps to which share when."""

from __future__ import annotations

import pytest

from rollplex_coordinator.decisions.window import Window, window_of


def test_prefix_work_is_limited_only_beside_a_rollout() -> None:
    window = Window(prefix_share=0.6)
    assert (window.share(beside=True), window.share(beside=False)) == (0.6, 1.0)


@pytest.mark.parametrize("sharing", [None, "turns"])
def test_where_nothing_runs_at_the_same_time_nobody_is_limited(sharing: str | None) -> None:
    assert window_of(sharing, prefix_share=0.6, decode_share=0.4) == Window()
    assert not window_of(sharing, prefix_share=0.6, decode_share=0.4).limited


def test_shares_hold_under_mps() -> None:
    window = window_of("mps", prefix_share=0.6, decode_share=0.4)
    assert window == Window(prefix_share=0.6, decode_share=0.4)
    assert window.limited
    assert window_of("mps", prefix_share=1.0, decode_share=0.4).limited
    assert not window_of("mps", prefix_share=1.0, decode_share=1.0).limited
