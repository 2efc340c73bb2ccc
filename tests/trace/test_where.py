"""Where the time of an iteration goes, on a run whose times are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.trace.marks import Chapter, Mark
from rollplex.trace.source import Source
from rollplex.trace.steps import Steps
from rollplex.trace.where import covered_ns, hidden_share, iteration_table, table, times
from support.journals import JournalScript, run_of


def of_step(journal: Path, step: int) -> Chapter:
    with Source(journal) as source:
        return next(chapter for chapter in source.chapters(Steps()) if chapter.step == step)


def test_each_phase_has_its_length_and_the_busy_time_of_each_service(tmp_path: Path) -> None:
    found = times(of_step(run_of(tmp_path, 2), 1))
    rounded = {phase: {name: round(s * 1e3, 3) for name, s in row.items()} for phase, row in found.items()}
    zero = {"rollout": 0.0, "prefix": 0.0, "trainer": 0.0, "rewards": 0.0}
    assert rounded == {
        "IDLE": {**zero, "whole": 30.0, "nobody": 30.0},
        "ROLLOUT": {
            "whole": 91.5,
            "rollout": 80.0,
            "prefix": 60.0,
            "trainer": 0.0,
            "rewards": 4.5,
            "nobody": 11.0,
        },
        "SCORE": {**zero, "whole": 19.0, "prefix": 17.0, "rewards": 3.5, "nobody": 1.5},
        "TRAIN": {**zero, "whole": 39.5, "prefix": 18.0, "trainer": 17.0, "nobody": 12.5},
        "UPDATE": {**zero, "whole": 20.0, "trainer": 6.0, "nobody": 14.0},
    }


def test_work_that_overlaps_counts_once() -> None:
    assert covered_ns([(0, 10), (5, 12), (6, 7), (20, 30)], 2, 25) == 15
    assert covered_ns([], 0, 9) == covered_ns([(0, 3), (9, 12)], 3, 9) == 0


def test_the_time_before_a_checkpoint_is_not_the_time_between_iterations(tmp_path: Path) -> None:
    with JournalScript(tmp_path) as script:
        script.iteration(0, 1.0)
        script.phase(1.5, "CHECKPOINT")
        script.phase(2.5, "IDLE")
        script.iteration(1, 3.0)
    assert times(of_step(script.path, 0))["IDLE"]["whole"] == 0.0
    assert times(of_step(script.path, 1))["IDLE"]["whole"] == pytest.approx(0.51)


def test_the_share_of_hidden_prefix_time_is_that_inside_the_decode_units(tmp_path: Path) -> None:
    chapter = of_step(run_of(tmp_path, 1), 0)
    assert hidden_share([chapter]) == 1.0
    chapter.marks.append(
        Mark(track="prefix[0:0]", name="late", kind="actor_prefix", start_ns=11_080_000_000, end_ns=11_140_000_000)
    )
    assert hidden_share([chapter]) == pytest.approx((60 + 20) / 120)
    assert hidden_share([Chapter()]) is None


def test_the_table_has_medians_without_the_first_iterations(tmp_path: Path) -> None:
    with JournalScript(tmp_path) as script:
        script.start(0.5)
        for step in range(8):
            script.iteration(step, 1.0 + step * 0.2 + (step == 1) * 0.05)
    lines = iteration_table(script.path)
    assert lines[0] == "where the time of an iteration goes: median of 5 iterations, the first 3 left out, ms"
    assert lines[1].split() == ["whole", "share", "rollout", "prefix", "trainer", "rewards", "nobody"]
    assert lines[3].split() == ["ROLLOUT", "91.5", "46%", "80.0", "60.0", "0.0", "4.5", "11.0"]
    assert lines[7].split() == ["iteration", "200.0", "100%", "80.0", "95.0", "23.0", "8.0", "69.0"]
    assert len({len(line) for line in lines[1:8]}) == 1


def test_one_slow_iteration_moves_no_median(tmp_path: Path) -> None:
    with JournalScript(tmp_path) as script:
        at_s = 1.0
        for step in range(5):
            script.iteration(step, at_s)
            at_s += 60.0 if step == 2 else 0.2
    lines = iteration_table(script.path)
    assert lines[0].endswith("median of 5 iterations, ms")
    assert lines[2].split()[:2] == ["IDLE", "30.0"]


def test_long_iterations_are_told_in_seconds() -> None:
    row = {"whole": 30.0, "rollout": 20.0, "prefix": 0.0, "trainer": 0.0, "rewards": 0.0, "nobody": 10.0}
    lines = table([{"ROLLOUT": row}])
    assert lines[0] == "where the time of an iteration goes: median of 1 iteration, s"
    assert lines[2].split()[:3] == ["ROLLOUT", "30.0", "100%"]


def test_iterations_that_are_not_done_do_not_count(tmp_path: Path) -> None:
    with JournalScript(tmp_path) as script:
        script.iteration(0, 1.0, upto=0.15)
    assert iteration_table(script.path) == ["where the time goes: no iteration is finished yet"]
