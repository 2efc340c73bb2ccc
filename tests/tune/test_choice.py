"""Which division is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex.errors import ConfigError
from rollplex.tune.candidates import TURNS, WHOLE, Candidate, grid, parse_candidates
from rollplex.tune.choice import Alone, Measured, choose

ALONE = Alone(rollout_s=6.0, prefix_s=2.0)
SEVENTY, SIXTY, DISJOINT = (
    Candidate(prefix_share=0.7),
    Candidate(prefix_share=0.6),
    Candidate(prefix_share=0.6, decode_share=0.4),
)


def measured(candidate: Candidate, rollout_s: float, *, hidden: float = 1.0, spread: float = 0.0) -> Measured:
    return Measured(candidate=candidate, rollout_s=rollout_s, hidden=hidden, iteration_s=20.0, spread=spread)


def test_the_ratio_is_what_is_gained_over_one_after_the_other() -> None:
    assert measured(WHOLE, 8.0).ratio(ALONE) == 1.0
    assert measured(SIXTY, 6.4).ratio(ALONE) == pytest.approx(1.25)
    assert measured(SIXTY, 6.4, hidden=0.5).cost_s(ALONE) == pytest.approx(7.4)


def test_the_fastest_is_taken_if_it_wins_clearly() -> None:
    choice = choose(ALONE, [measured(WHOLE, 7.9), measured(SEVENTY, 7.4), measured(DISJOINT, 6.8)])
    assert (choice.taken, choice.gains) == (DISJOINT, True)
    assert choice.ratio == pytest.approx(8.0 / 6.8)


def test_within_what_repeats_differ_by_the_smallest_change_is_taken() -> None:
    rows = [measured(WHOLE, 7.9), measured(SEVENTY, 7.0, spread=0.04), measured(SIXTY, 6.9), measured(DISJOINT, 6.8)]
    assert choose(ALONE, rows).taken == SEVENTY
    assert choose(ALONE, rows).noise == 0.04


def test_a_change_that_wins_nothing_is_not_made() -> None:
    choice = choose(ALONE, [measured(DISJOINT, 7.95), measured(WHOLE, 7.99)])
    assert (choice.taken, choice.gains) == (WHOLE, False)


def test_the_noise_of_the_rows_alone_counts_too() -> None:
    noisy = Alone(rollout_s=6.0, prefix_s=2.0, spread=0.2)
    choice = choose(noisy, [measured(WHOLE, 7.9), measured(DISJOINT, 6.8)])
    assert (choice.taken, choice.noise) == (WHOLE, 0.2)


def test_time_slices_are_compared_and_never_taken() -> None:
    assert choose(ALONE, [measured(WHOLE, 7.9), measured(TURNS, 5.0)]).taken == WHOLE


def test_prefix_work_that_was_not_hidden_costs_its_time_alone() -> None:
    late = measured(SEVENTY, 6.1, hidden=0.0)  # quick because nothing ran beside it
    assert choose(ALONE, [measured(WHOLE, 7.9), late, measured(SIXTY, 7.0)]).taken == SIXTY


@given(
    costs=st.lists(st.floats(1.0, 100.0), min_size=1, max_size=8),
    spread=st.floats(0.0, 0.5),
)
def test_what_is_taken_is_never_worse_than_the_best_by_more_than_the_noise(costs: list[float], spread: float) -> None:
    rows = [
        measured(Candidate(prefix_share=1.0 - number / 10), cost, spread=spread) for number, cost in enumerate(costs)
    ]
    choice = choose(ALONE, rows)
    taken = next(row for row in rows if row.candidate == choice.taken)
    assert taken.cost_s(ALONE) <= min(costs) * (1.0 + choice.noise) * (1.0 + 1e-9)


# --- candidates -----------------------------------------------------------------------------------------------------


def test_the_grid_has_the_whole_device_first_and_limits_decoding_only_where_that_is_possible() -> None:
    assert grid(limits_decoding=True)[:2] == (WHOLE, TURNS)
    assert any(one.decode_share < 1.0 for one in grid(limits_decoding=True))
    assert all(one.decode_share == 1.0 for one in grid(limits_decoding=False))
    assert all(one.prefix_share + one.decode_share <= 1.0 for one in grid(limits_decoding=True) if one.decode_share < 1)


def test_candidates_are_read_and_the_whole_device_is_always_among_them() -> None:
    assert parse_candidates("0.64:0.36, turns,0.64:0.36") == (
        WHOLE,
        Candidate(prefix_share=0.64, decode_share=0.36),
        TURNS,
    )


@pytest.mark.parametrize("text", ["", "0.5", "0.5:0", "0.5:1.1", "a:b", "mps", "nan:1"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--candidates"):
        parse_candidates(text)


def test_names_and_keys_of_a_candidate() -> None:
    assert [one.name for one in (WHOLE, TURNS, Candidate(prefix_share=0.64, decode_share=0.36))] == [
        "p1000d1000",
        "turns",
        "p640d360",
    ]
    assert Candidate(prefix_share=0.64, decode_share=0.36).overrides == (
        "device.sharing=mps",
        "device.prefix_share=0.64",
        "device.decode_share=0.36",
    )
