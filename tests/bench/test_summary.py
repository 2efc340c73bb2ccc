"""Medians, spreads, gains and ceilings of rows written by hand."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from rollplex.bench.ceilings import hiding_ceilings, sharing_ceiling
from rollplex.bench.facts import Facts
from rollplex.bench.lengths import parse_lengths
from rollplex.bench.rows import Row, choose_modes
from rollplex.bench.scaling import at_prompts, thinned
from rollplex.bench.summary import Gain, gains, summarise, token_ceiling, unlike
from rollplex.bench.window import windows

MakeRow = Callable[..., Row]
SIX = choose_modes("serial,overlap,stream", "shared,replicated")


def _gains(rows: list[Row]) -> dict[str, Gain]:
    return {gain.name: gain for gain in gains(rows)}


def test_a_mode_is_the_median_of_its_repeats_with_the_lowest_and_the_highest(row: MakeRow) -> None:
    rows = [row("serial", "shared", repeat, iteration=value) for repeat, value in enumerate((3.0, 1.0, 1.5))]
    (summary,) = summarise([*rows, row("stream", "shared")], SIX[:1])
    seconds = summary.seconds["iteration"]
    assert (seconds.median, seconds.low, seconds.high, seconds.count) == (1.5, 1.0, 3.0, 3)
    assert seconds.width == pytest.approx(2.0 / 1.5)


def test_scoring_and_training_are_summed_row_by_row_before_the_median(row: MakeRow) -> None:
    parts = ((1.0, 9.0), (2.0, 2.0), (9.0, 1.0))
    rows = [row("serial", "shared", repeat, score=score, train=train) for repeat, (score, train) in enumerate(parts)]
    (summary,) = summarise(rows, SIX)
    assert summary.seconds["score_and_train"].median == 10.0
    assert summary.seconds["score"].median + summary.seconds["train"].median == 4.0


def test_sharing_and_overlap_are_told_apart_and_both_is_the_product_of_what_was_measured(row: MakeRow) -> None:
    iteration = {
        ("serial", "replicated"): 12.0,
        ("overlap", "replicated"): 10.0,
        ("stream", "replicated"): 8.0,
        ("serial", "shared"): 4.0,
        ("overlap", "shared"): 3.0,
        ("stream", "shared"): 2.0,
    }
    found = _gains([row(*mode, iteration=value) for mode, value in iteration.items()])
    assert {name: gain.gain for name, gain in found.items() if gain.what == "iteration"} == {
        "sharing alone": pytest.approx(3.0),
        "overlap alone, prefixes shared": pytest.approx(4 / 3),
        "overlap alone, prefixes replicated": pytest.approx(1.2),
        "stream alone, prefixes shared": pytest.approx(2.0),
        "stream alone, prefixes replicated": pytest.approx(1.5),
        "sharing and overlap": pytest.approx(4.0),
        "sharing and stream": pytest.approx(6.0),
    }


def test_the_gain_of_scoring_and_training_alone_leaves_the_rollout_out(row: MakeRow) -> None:
    rows = [
        row("serial", "replicated", iteration=20.0, rollout=10.0, score=2.0, train=8.0),
        row("serial", "shared", iteration=12.0, rollout=10.0, score=0.5, train=1.5),
    ]
    found = _gains(rows)
    assert found["sharing alone"].gain == pytest.approx(20 / 12)
    assert found["sharing alone, scoring and training only"].gain == pytest.approx(5.0)


def test_gains_of_modes_that_were_not_run_are_left_out(row: MakeRow) -> None:
    assert list(_gains([row("serial", "shared"), row("overlap", "shared")])) == ["overlap alone, prefixes shared"]
    assert gains([row("serial", "shared")]) == ()


def test_a_gain_that_is_smaller_than_the_spread_of_either_mode_is_within_noise(row: MakeRow) -> None:
    steady = [row("serial", "shared", repeat, iteration=2.0) for repeat in range(3)]
    wild = [row("overlap", "shared", repeat, iteration=value) for repeat, value in enumerate((1.7, 1.9, 2.1))]
    calm = [row("overlap", "shared", repeat, iteration=value) for repeat, value in enumerate((1.89, 1.9, 1.91))]
    (noisy,), (clear,) = gains([*steady, *wild]), gains([*steady, *calm])
    assert noisy.gain == clear.gain == pytest.approx(2.0 / 1.9)
    assert noisy.within_noise
    assert noisy.noise == pytest.approx(0.4 / 1.9)
    assert not clear.within_noise
    assert noisy.low == pytest.approx(2.0 / 2.1)
    assert noisy.high == pytest.approx(2.0 / 1.7)


def test_with_one_repeat_no_noise_is_claimed(row: MakeRow) -> None:
    (gain,) = gains([row("serial", "shared"), row("overlap", "shared")])
    assert (gain.repeats, gain.noise, gain.within_noise) == (1, 0.0, False)


@pytest.mark.parametrize(
    ("prompt", "response", "group", "ceiling"),
    [(611.0, 32.0, 8, 8 * 643 / 867), (99.0, 256.0, 8, 8 * 355 / 2147), (0.0, 10.0, 8, 1.0), (100.0, 0.0, 8, 8.0)],
)
def test_the_ceiling_of_sharing_counts_tokens(prompt: float, response: float, group: int, ceiling: float) -> None:
    assert token_ceiling(prompt, response, group) == pytest.approx(ceiling)


def test_the_ceiling_by_unit_times_takes_the_prefix_as_often_as_there_are_responses(row: MakeRow, facts: Facts) -> None:
    modes = summarise([row("serial", "shared")], SIX)
    ceiling = sharing_ceiling(modes, facts)
    assert ceiling.tokens == pytest.approx(8 * 632 / (600 + 8 * 32))
    assert ceiling.unit_times == pytest.approx((8 * 1.0 + 0.4) / 1.4)
    assert sharing_ceiling(summarise([row("overlap", "shared")], SIX), facts).unit_times is None


def test_what_overlap_can_hide_is_the_smaller_of_prefix_forwards_and_rollout(row: MakeRow) -> None:
    rows = [
        row("serial", "shared", iteration=2.0, rollout=0.5, prefix_forward=0.2, score=0.4, train=1.0),
        row("serial", "replicated", iteration=4.0, rollout=0.5, prefix_forward=1.6, score=1.4, train=2.0),
        row("overlap", "shared"),
    ]
    shared, replicated = hiding_ceilings(summarise(rows, SIX))
    assert (shared.prefix, shared.overlap_s) == ("shared", 0.2)
    assert shared.overlap == pytest.approx(2.0 / 1.8)
    assert shared.stream == pytest.approx(2.0 / 1.5)
    assert (replicated.prefix, replicated.overlap_s) == ("replicated", 0.5)
    assert replicated.overlap == pytest.approx(4.0 / 3.5)


def test_serial_as_practised_is_compared_with_what_it_is_to_be_replaced_by(row: MakeRow) -> None:
    rows = [row("practised", "replicated", iteration=9.0), row("overlap", "shared", iteration=3.0)]
    assert _gains(rows)["overlap shared, over serial as practised"].gain == pytest.approx(3.0)


def test_a_window_counts_the_work_that_was_done_beside_the_rollout(row: MakeRow) -> None:
    rows = [
        row("serial", "shared", generate=4.0, prefix_forward=2.0),
        row("overlap", "shared", generate=5.0, work_hidden=0.5),
        row("stream", "shared", generate=9.0),
        row("overlap", "replicated", generate=5.0),
    ]
    (window,) = windows(summarise(rows, SIX))
    assert window.ratio == pytest.approx((4.0 + 0.5 * 2.0) / 5.0)
    assert window.slowdown == pytest.approx(1.25)
    unequal = [rows[0], msgspec.structs.replace(rows[1], prompts=16)]
    assert windows(summarise(unequal, SIX)) == ()


def test_a_row_with_fewer_prompts_is_scaled_where_work_is_done_prompt_by_prompt(row: MakeRow) -> None:
    few = row("serial", "replicated", prompts=16)
    whole = at_prompts(few, 64)
    assert whole.median_s["score"] == pytest.approx(4 * few.median_s["score"])
    assert whole.median_s["train"] == pytest.approx(4 * few.median_s["train"])
    assert whole.median_s["rollout"] == few.median_s["rollout"]
    assert whole.median_s["update"] == few.median_s["update"]
    more = 3 * (few.median_s["score"] + few.median_s["train"])
    assert whole.median_s["iteration"] == pytest.approx(few.median_s["iteration"] + more)
    assert at_prompts(few, 16) is few
    assert at_prompts(row("serial", "shared"), 64).prompts == 0


def test_fewer_lengths_have_about_the_same_mean_and_tail() -> None:
    lengths = parse_lengths("tail:512:2048").of(512)
    few = thinned(lengths, 128)
    assert len(few) == 128
    assert sum(few) / 128 == pytest.approx(512, rel=0.02)
    assert max(few) > 1900
    assert list(few) != sorted(few)
    assert thinned((3,), 8) == (3,)


def test_digests_must_agree_over_schedules_and_repeats_but_not_over_kinds_of_prefix(row: MakeRow) -> None:
    rows = [row(mode.schedule, mode.prefix, repeat) for mode in SIX for repeat in range(2)]
    assert unlike(summarise(rows, SIX)) == []
    for odd in (row("stream", "shared", 2, digest="other weights"), row("serial", "shared", 2, digest="other weights")):
        (problem,) = unlike(summarise([*rows, odd], SIX))
        assert problem.startswith("shared: serial")
        assert "other weigh" in problem
