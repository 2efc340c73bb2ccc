"""Rows of a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex.data.order import batches, epochs, permutation, rows_of_step
from rollplex.errors import ConfigError


def test_an_epoch_goes_through_all_rows_once() -> None:
    rows = [row for step in range(5) for row in rows_of_step(step, 4, 20, seed=3, shuffle=True)]
    assert sorted(rows) == list(range(20))
    assert rows != sorted(rows)


def test_epochs_are_whole_where_all_rows_were_seen() -> None:
    assert [epochs(steps, 4, 20, shuffle=True) for steps in (0, 1, 5, 7)] == [0.0, 0.2, 1.0, 1.4]
    assert epochs(5, 4, 22, shuffle=True) == 1.0  # two rows fill no step
    assert epochs(11, 4, 22, shuffle=False) == 2.0
    assert epochs(3, 2, (0, 4, 5, 9), shuffle=False) == 1.5


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    orders = {tuple(permutation(50, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_the_order_is_what_it_was_when_the_runs_of_today_were_made() -> None:
    """Fixed numbers: another order would give every resumed run other data."""
    assert permutation(8, 0, 0).tolist() == ORDER_0
    assert permutation(8, 7, 2).tolist() == ORDER_7_2


ORDER_0 = [2, 7, 0, 1, 5, 6, 3, 4]
ORDER_7_2 = [7, 5, 6, 0, 2, 4, 1, 3]


@given(
    total=st.integers(1, 60), num_prompts=st.integers(1, 60), step=st.integers(0, 10**6), seed=st.integers(0, 2**53 - 1)
)
def test_a_step_never_has_a_row_twice_and_depends_on_nothing_else(
    total: int, num_prompts: int, step: int, seed: int
) -> None:
    for shuffle in (False, True):
        if num_prompts > total:
            with pytest.raises(ConfigError, match="more rows"):
                rows_of_step(step, num_prompts, total, seed=seed, shuffle=shuffle)
            continue
        rows = rows_of_step(step, num_prompts, total, seed=seed, shuffle=shuffle)
        assert len(set(rows)) == num_prompts
        assert set(rows) <= set(range(total))
        assert rows == rows_of_step(step, num_prompts, range(total), seed=seed, shuffle=shuffle)


def test_rejected_rows_are_skipped() -> None:
    good = (0, 2, 3, 7, 11, 12)
    rows = [row for step in range(3) for row in rows_of_step(step, 2, good, seed=1, shuffle=True)]
    assert sorted(rows) == list(good)


def test_without_shuffling_steps_go_round_the_file() -> None:
    assert [rows_of_step(step, 2, (4, 5, 9), seed=0, shuffle=False) for step in range(3)] == [(4, 5), (9, 4), (5, 9)]


def test_an_evaluation_reads_every_row_once() -> None:
    assert batches(7, 3) == [(0, 1, 2), (3, 4, 5), (6,)]
    assert batches((1, 5, 6), 2) == [(1, 5), (6,)]
    assert batches(7, 3, limit=4) == [(0, 1, 2), (3,)]
    assert batches(2, 3, limit=9) == [(0, 1)]
