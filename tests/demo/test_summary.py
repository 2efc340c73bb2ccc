"""The demo in words: medians, and one evaluation or several."""

from __future__ import annotations

import json
from pathlib import Path

from rollplex.demo.digits import Written
from rollplex.demo.recipe import QUICK_DIGITS, QUICK_PROMISE, DemoFolder
from rollplex.demo.result import Measured, Result
from rollplex.demo.summary import result_lines, time_lines, verdict

WRITTEN = DemoFolder(
    config=Path("config.yaml"),
    digits=QUICK_DIGITS,
    rows=Written(num_train=564, num_held_out=156),
    promise=QUICK_PROMISE,
)


def _measured(step: int, accuracy: float) -> Measured:
    return Measured(step=step, accuracy=accuracy, count=156)


def test_a_run_that_goes_on_from_another_has_no_before() -> None:
    result = Result(done=9, wanted=9, held_out=(_measured(200, 0.5), _measured(400, 0.9)), grey=())
    assert "0.500 after 200, 0.900 after 400 iterations" in "\n".join(result_lines(result, WRITTEN))


def test_a_control_above_chance_is_not_called_chance() -> None:
    result = Result(done=9, wanted=9, held_out=(), grey=(_measured(400, 0.6),))
    text = "\n".join(result_lines(result, WRITTEN))
    assert "above chance, which must not be" in text
    assert "as it must (" not in text


def test_times_are_medians_and_an_empty_run_has_only_its_length(tmp_path: Path) -> None:
    assert time_lines(tmp_path, seconds=3.2)[3:] == ["  whole run           3 s, start and evaluations included"]
    rows = [{"step": 0, "time/step_s": s, "time/rollout_s": s / 2, "time/prefix_in_window": s} for s in (0.2, 0.4, 9.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "\n".join(time_lines(tmp_path, seconds=3.2))
    assert "400 ms (median): rollout 200 ms" in text
    assert "40% of the prefix work" in text


def test_a_broken_promise_is_told_with_what_to_look_at() -> None:
    result = Result(done=9, wanted=9, held_out=(_measured(400, 0.8),), grey=(_measured(400, 0.2),))
    passed, lines = verdict(result, QUICK_PROMISE)
    assert not passed
    assert [line[:4] for line in lines[1:3]] == ["FAIL", "PASS"]
    assert "constraints/host.txt" in "\n".join(lines)
