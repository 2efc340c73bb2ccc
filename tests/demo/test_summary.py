"""The demo in words: medians, and one evaluation or several."""

from __future__ import annotations

import json
import re
import time
from contextlib import closing
from pathlib import Path

from rollplex.demo.digits import Written
from rollplex.demo.recipe import QUICK_DIGITS, QUICK_PROMISE, DemoFolder
from rollplex.demo.result import Measured, Result
from rollplex.demo.summary import result_lines, time_lines, verdict
from rollplex.journal import events
from rollplex.journal.phases import Phase
from rollplex_coordinator.records.journal import Journal

WRITTEN = DemoFolder(
    config=Path("config.yaml"),
    digits=QUICK_DIGITS,
    rows=Written(num_train=564, num_held_out=156),
    promise=QUICK_PROMISE,
)


def _write_journal(file: Path) -> None:
    """A hundred seconds of start, and one iteration."""
    now = time.monotonic()
    with closing(Journal(file)) as journal:
        journal.append(
            events.RunStarted(
                run="r",
                pid=1,
                host="h",
                boot_id="b",
                seed=0,
                schedule="overlap",
                share_prefix=True,
                config_digest="d",
            )
        )
        journal.append(events.StageDone(name="processes", start_s=now - 100.0, end_s=now))
        journal.append(events.IterationStarted(step=0, version=0, rows=(0,)))
        for offset, phase in enumerate((Phase.ROLLOUT, Phase.SCORE, Phase.IDLE)):
            journal.append(events.PhaseEntered(phase=phase.name, start_s=now + offset, step=0))
        journal.append(events.IterationDone(step=0, version=1, metrics={}))


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


def test_a_run_without_iterations_has_only_its_length(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").touch()
    assert time_lines(tmp_path, seconds=3.2)[3:] == ["  whole run           3 s, start and evaluations included"]


def test_times_are_medians_and_the_start_is_told_apart(tmp_path: Path) -> None:
    rows = [{"step": step, "time/prefix_in_window": share} for step, share in enumerate((0.2, 0.4, 0.9))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _write_journal(tmp_path / "journal.sqlite")
    text = "\n".join(time_lines(tmp_path, seconds=33.2))
    assert re.search(r"33 s, start and evaluations included; 10\d\.\d s to the first iteration", text)
    assert "40% of the prefix work" in text
    assert "  ROLLOUT " in text


def test_a_broken_promise_is_told_with_what_to_look_at() -> None:
    result = Result(done=9, wanted=9, held_out=(_measured(400, 0.8),), grey=(_measured(400, 0.2),))
    is_kept, lines = verdict(result, QUICK_PROMISE, is_exact=True)
    assert not is_kept
    assert [line[:4] for line in lines[1:4]] == ["FAIL", "PASS", "PASS"]
    assert "constraints/host.txt" in "\n".join(lines)


def test_an_exactness_that_was_not_looked_at_neither_keeps_nor_breaks_the_promise() -> None:
    result = Result(done=9, wanted=9, held_out=(_measured(400, 0.9),), grey=(_measured(400, 0.2),))
    for is_exact, mark in ((True, "PASS"), (False, "FAIL"), (None, "----")):
        is_kept, lines = verdict(result, QUICK_PROMISE, is_exact=is_exact)
        assert is_kept == (mark != "FAIL")
        assert lines[3].startswith(f"{mark}  split and unsplit computation")
