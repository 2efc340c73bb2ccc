"""What a run reached, and when a promise is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollplex.demo.recipe import FULL_PROMISE, QUICK_PROMISE
from rollplex.demo.result import Measured, Result, keeps_grey, keeps_held_out, read_result
from rollplex.errors import DataError


def _row(name: str, step: int, accuracy: float) -> dict[str, object]:
    means = {"rewards/digit_reward/mean": 0.9, "rewards/right/mean": accuracy}
    return {"name": name, "step": step, "version": step, "reward": 0.9, "count": 156.0, **means}


def _write(folder: Path, rows: list[dict[str, object]], *, steps: int) -> None:
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(steps)))


def test_evaluations_are_told_apart_by_name_and_kept_in_order(tmp_path: Path) -> None:
    _write(
        tmp_path, [_row("held_out", 0, 0.01), _row("held_out", 400, 0.93), _row("held_out_grey", 400, 0.26)], steps=400
    )
    result = read_result(tmp_path, wanted=400)
    assert [measured.step for measured in result.held_out] == [0, 400]
    assert result.held_out[-1] == Measured(step=400, accuracy=0.93, count=156)
    assert result.held_out[-1].num_right == 145
    assert [measured.accuracy for measured in result.grey] == [0.26]
    assert result.is_complete


def test_accuracy_is_the_share_of_right_answers_not_the_shaped_reward(tmp_path: Path) -> None:
    _write(tmp_path, [_row("held_out", 0, 0.125)], steps=0)
    assert read_result(tmp_path, wanted=400).held_out[0].accuracy == 0.125


def test_an_empty_run_directory_is_a_run_that_got_nowhere(tmp_path: Path) -> None:
    result = read_result(tmp_path, wanted=400)
    assert (result.done, result.held_out, result.is_complete) == (0, (), False)


def test_an_evaluation_without_the_accuracy_is_an_error(tmp_path: Path) -> None:
    row = _row("held_out", 400, 0.5)
    del row["rewards/right/mean"]
    _write(tmp_path, [row], steps=400)
    with pytest.raises(DataError, match="rewards/right/mean"):
        read_result(tmp_path, wanted=400)


def _reached(held_out: float | None, grey: float | None) -> Result:
    made = [() if value is None else (Measured(step=9, accuracy=value, count=100),) for value in (held_out, grey)]
    return Result(done=9, wanted=9, held_out=made[0], grey=made[1])


def test_promises_hold_at_their_bounds_and_break_beyond() -> None:
    assert (QUICK_PROMISE.held_out, QUICK_PROMISE.grey) == (0.85, 0.4)
    assert (FULL_PROMISE.held_out, FULL_PROMISE.grey) == (0.90, 0.2)
    assert keeps_held_out(_reached(0.90, 0.1), FULL_PROMISE)
    assert not keeps_held_out(_reached(0.899, 0.1), FULL_PROMISE)
    assert keeps_grey(_reached(0.9, 0.199), FULL_PROMISE)
    assert not keeps_grey(_reached(0.9, 0.2), FULL_PROMISE)


def test_what_was_not_measured_keeps_no_promise() -> None:
    assert not keeps_held_out(_reached(None, 0.1), FULL_PROMISE)
    assert not keeps_grey(_reached(0.9, None), FULL_PROMISE)


def test_only_the_last_evaluation_counts() -> None:
    first, last = Measured(step=0, accuracy=1.0, count=9), Measured(step=9, accuracy=0.5, count=9)
    assert not keeps_held_out(Result(done=9, wanted=9, held_out=(first, last), grey=()), FULL_PROMISE)
