"""Modes, and their order in a repeat."""

from __future__ import annotations

import pytest

from rollplex.bench.rows import Mode, choose_modes, choose_rows, order, practised
from rollplex.errors import ConfigError

SIX = choose_modes("serial,overlap,stream", "shared,replicated")


def test_all_pairs_of_the_two_lists_are_run_and_repeated_words_once() -> None:
    assert [mode.name for mode in SIX] == [
        "serial shared",
        "serial replicated",
        "overlap shared",
        "overlap replicated",
        "stream shared",
        "stream replicated",
    ]
    assert choose_modes(" overlap , overlap", "shared") == (Mode(schedule="overlap", prefix="shared"),)


def test_a_mode_says_which_keys_make_it() -> None:
    assert Mode(schedule="stream", prefix="replicated").overrides == ("run.schedule=stream", "run.share_prefix=false")
    assert Mode(schedule="serial", prefix="shared").overrides == ("run.schedule=serial", "run.share_prefix=true")


@pytest.mark.parametrize(
    ("schedules", "prefixes", "where", "hint"),
    [
        ("serial,overlp", "shared", "--modes", "Did you mean overlap"),
        ("serial", "share", "--prefixes", "Did you mean shared"),
        ("", "shared", "--modes", "some of serial, overlap, stream"),
    ],
)
def test_an_unknown_word_is_refused_with_the_option(schedules: str, prefixes: str, where: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        choose_modes(schedules, prefixes)
    assert caught.value.where == where


def test_rows_are_chosen_one_by_one() -> None:
    assert choose_rows("overlap:shared, practised,overlap:shared") == (
        Mode(schedule="overlap", prefix="shared"),
        practised(),
    )
    assert choose_rows(",".join(mode.text for mode in SIX)) == SIX


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("overlap:share", "Did you mean overlap:shared"),
        ("practiced", "Did you mean practised"),
        ("", "practised"),
    ],
)
def test_an_unknown_row_is_refused(text: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        choose_rows(text)
    assert caught.value.where == "--rows"


def test_serial_as_practised_is_replicated_with_a_second_copy_of_the_weights() -> None:
    assert practised().overrides == (
        "run.schedule=serial",
        "run.share_prefix=false",
        "rollout.sglang.own_weights=true",
    )
    assert practised().name == "practised replicated"


def test_every_repeat_runs_every_mode_once_and_no_two_follow_the_same_order() -> None:
    orders = [order(SIX, repeat) for repeat in range(4)]
    assert all(set(one) == set(SIX) and len(one) == len(SIX) for one in orders)
    assert len({tuple(mode.name for mode in one) for one in orders}) == 4


def test_over_two_repeats_all_modes_stand_equally_early() -> None:
    first, second = order(SIX, 0), order(SIX, 1)
    assert {first.index(mode) + second.index(mode) for mode in SIX} == {len(SIX) - 1}


def test_one_mode_alone_has_an_order_too() -> None:
    assert order(SIX[:1], 5) == [SIX[0]]
