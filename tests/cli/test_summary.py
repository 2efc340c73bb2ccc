"""What became of a run, and `rollplex runs`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from rollplex.cli.app import run
from rollplex.cli.summary import State, Summary, summarize
from rollplex.journal.events import ErrorRaised
from rollplex.protocol.claim import claim
from rollplex.protocol.common import ErrorReport
from support.runs import LiveRun, done, ended, leave, started

FAILED = ErrorRaised(error=ErrorReport(kind="DataError", what="no image"), phase="TRAIN", log_path="logs/input.log")


def look(run_dir: Path) -> Summary:
    return summarize(run_dir, run_dir.parent)


@pytest.mark.parametrize(
    ("reason", "code", "state"),
    [
        ("done", 0, State.DONE),
        ("stopped by http", 0, State.STOPPED),
        ("stopped by SIGINT", 130, State.STOPPED),
        ("row 3: no image", 1, State.FAILED),
        ("it does not fit", 2, State.REFUSED),
    ],
)
def test_how_a_run_ended_is_told_from_its_last_event(tmp_path: Path, reason: str, code: int, state: State) -> None:
    found = look(leave(tmp_path / "a-1", started(), done(0), done(1, 0.25), ended(reason, code)))
    assert (found.name, found.run, found.state, found.reason) == ("a-1", "r1", state, reason)
    assert (found.iterations, found.iterations_wanted, found.reward, found.checkpoint) == (2, 10, 0.25, None)
    assert found.started_s is not None
    assert found.ended_s is not None
    assert found.started_s <= found.ended_s


def test_a_run_without_a_last_event_was_killed(tmp_path: Path) -> None:
    found = look(leave(tmp_path / "a-1", started(), done(0)))
    assert (found.state, found.iterations) == (State.KILLED, 1)
    assert "without a word" in found.reason


def test_an_error_names_its_log_but_not_one_from_before_the_run_was_resumed(tmp_path: Path) -> None:
    assert look(leave(tmp_path / "a-1", started(), FAILED, ended("x", 1))).log_path == "logs/input.log"
    again = (started("r1"), FAILED, ended("x", 1), started("r2", 30), done(4), ended("done", run="r2"))
    found = look(leave(tmp_path / "a-2", *again))
    assert (found.run, found.state, found.log_path, found.iterations_wanted) == ("r2", State.DONE, "", 30)


def test_a_resumed_run_that_was_killed_did_not_end_as_the_one_before(tmp_path: Path) -> None:
    found = look(leave(tmp_path / "a-1", started("r1"), ended("done"), started("r2")))
    assert (found.run, found.state) == ("r2", State.KILLED)


def test_a_live_run_is_running_and_one_that_has_no_journal_yet_too(tmp_path: Path) -> None:
    with LiveRun(tmp_path / "a-1") as live:
        live.journal(done(0))
        found = look(live.run_dir)
        assert (found.state, found.iterations, found.ended_s) == (State.RUNNING, 1, None)
    with claim(tmp_path / "a-2", "r2"):
        found = look(tmp_path / "a-2")
        assert (found.state, found.run, found.iterations) == (State.RUNNING, "r2", 0)


def test_a_run_that_is_only_starting_does_not_show_what_the_one_before_left(tmp_path: Path) -> None:
    leave(tmp_path / "a-1", started("r1"), done(7), ended())
    with claim(tmp_path / "a-1", "r2"):
        found = look(tmp_path / "a-1")
    assert (found.state, found.run, found.iterations, found.reward) == (State.RUNNING, "r2", 0, None)


def test_a_directory_that_was_only_prepared_is_not_started(tmp_path: Path) -> None:
    claim(tmp_path / "a-1", "a").release()
    assert look(tmp_path / "a-1").state is State.NOT_STARTED


def test_a_damaged_journal_is_a_state_and_no_error(tmp_path: Path) -> None:
    claim(tmp_path / "a-1", "a").release()
    (tmp_path / "a-1" / "journal.sqlite").write_bytes(b"no database" * 100)
    found = look(tmp_path / "a-1")
    assert found.state is State.UNREADABLE
    assert "journal" in found.reason


def test_the_newest_checkpoint_is_that_with_the_highest_number(tmp_path: Path) -> None:
    run_dir = leave(tmp_path / "a-1", started(), ended())
    for name in ("step_9", "step_10", ".tmp-step_11-x", "notes"):
        (run_dir / "checkpoints" / name).mkdir(parents=True)
    assert look(run_dir).checkpoint == str(run_dir / "checkpoints" / "step_10")


def test_runs_lists_all_newest_first(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for at, (name, why) in enumerate((("b-1", "done"), ("demo-1/run", "stopped by http"))):
        run_dir = leave(runs_dir / name, started(), done(at), ended(why))
        for file in run_dir.glob("journal.sqlite*"):
            os.utime(file, (1000.0 + at, 1000.0 + at))
    (runs_dir / "demo-1" / "run" / "checkpoints" / "step_2").mkdir(parents=True)
    with LiveRun(runs_dir / "c-1") as live:
        live.journal(done(0), done(11))
        assert run(["runs"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split()[:4] == ["name", "started", "state", "iterations"]
        cells = [re.split(r" {2,}", line) for line in lines[1:]]
        assert [(row[0], *row[2:]) for row in cells] == [
            ("c-1", "running", "12", "0.500"),
            ("demo-1", "stopped", "2/10", "0.500", "step_2"),
            ("b-1", "done", "1/10", "0.500"),
        ]
        assert run(["runs", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [(each["name"], each["state"], each["iterations_wanted"]) for each in found] == [
            ("c-1", "running", 10),
            ("demo-1", "stopped", 10),
            ("b-1", "done", 10),
        ]


def test_no_runs_is_no_error_and_says_how_to_start_one(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs"]) == 0
    assert "no runs yet. Start one with `rollplex demo --quick`" in capsys.readouterr().out
    assert run(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
