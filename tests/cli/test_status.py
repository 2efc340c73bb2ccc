"""`rollplex status` and `rollplex start`: a live run, one that ended, and one that is watched."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollplex.cli import status as module
from rollplex.cli.api import Gpu, Restart, Tracker
from rollplex.cli.app import run
from rollplex.cli.status import _gpu, _restart, _tracker, watch
from rollplex.errors import WaitError
from support.runs import LiveRun, done, ended, leave, started
from support.terminals import Terminal, lines_of

Said = pytest.CaptureFixture[str]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], None]:
    """Let something happen, instead of time, whenever a watch pauses."""

    def happen(act: Callable[[int], None]) -> None:
        count = iter(range(1000))
        clock = SimpleNamespace(
            sleep=lambda _: act(next(count)),
            time=time.time,
            monotonic=time.monotonic,
            strftime=time.strftime,
            localtime=time.localtime,
        )
        monkeypatch.setattr(module, "time", clock)

    return happen


def test_a_live_run_tells_phase_iterations_waits_memory_and_services(runs_dir: Path, capsys: Said) -> None:
    with LiveRun(runs_dir / "a-1") as live:
        live.journal(done(3, 0.75))
        assert run(["status"]) == 0
    text = capsys.readouterr().out
    lines = dict(line.split(None, 1) for line in text.splitlines())
    assert lines["run"] == "r1 (a-1)"
    assert lines["folder"] == str(runs_dir / "a-1")
    assert lines["state"].startswith("running for ")
    assert lines["phase"] == "ROLLOUT, step 4, weights version 4, overlap"
    assert lines["iterations"] == "4 done of 10 wanted"
    assert lines["reward"] == "0.750 in the last iteration"
    assert lines["checkpoint"] == "none yet"
    assert lines["waiting"].startswith("for rollout[0:0]: unit 3, since ")
    assert lines["waiting"].endswith("(2 s); an error after 1 min 00 s without progress")
    assert lines["memory"] == "device 0:0: 64 B leased of a budget of 128 B, at most 96 B so far"
    assert "trainer[0:0] busy (pid 7)" in text
    assert "prefix[0:0] dead (pid 8, started 2 times)" in text
    assert "of prefix waits for 100 B (workspace)" in text


def test_as_json_a_live_run_is_summary_status_ledger_and_services(runs_dir: Path, capsys: Said) -> None:
    with LiveRun(runs_dir / "a-1"):
        assert run(["status", "a-1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["summary"]["name"], found["summary"]["state"]) == ("a-1", "running")
    live = found["live"]
    assert (live["status"]["phase"], live["status"]["waiting"][0]["for"]) == ("ROLLOUT", "unit 3")
    assert live["ledger"]["devices"][0]["budget_bytes"] == 128
    assert [service["state"] for service in live["services"]] == ["busy", "dead"]


def test_a_run_that_ended_tells_how_and_when_and_what_it_left(runs_dir: Path, capsys: Said) -> None:
    run_dir = leave(runs_dir / "a-1", started(), done(0), ended("row 3: no image", 1))
    (run_dir / "checkpoints" / "step_1").mkdir(parents=True)
    assert run(["status"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines["state"].startswith("failed, 20")
    assert lines["state"].endswith(" ago")
    assert lines["reason"] == "row 3: no image"
    assert lines["iterations"] == "1 of 10"
    assert lines["checkpoint"] == str(run_dir / "checkpoints" / "step_1")
    assert run(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["live"], found["summary"]["reason"]) == (None, "row 3: no image")


def test_a_run_that_served_wanted_none_at_its_start(runs_dir: Path, capsys: Said) -> None:
    leave(runs_dir / "a-1", started(wanted=0), done(0), done(1), ended())
    assert run(["status"]) == 0
    assert "iterations  2\n" in capsys.readouterr().out


def test_a_run_that_is_only_starting_is_an_error_that_says_so(runs_dir: Path, capsys: Said) -> None:
    with LiveRun(runs_dir / "a-1") as live:
        (live.run_dir / "http.json").unlink()
        assert run(["status"]) == 1
    assert "only starting" in capsys.readouterr().err


def test_without_a_run_it_says_how_to_start_one(runs_dir: Path, capsys: Said) -> None:
    assert run(["status"]) == 2
    assert "rollplex demo --quick" in capsys.readouterr().err


def test_json_and_watch_exclude_each_other(runs_dir: Path, capsys: Said) -> None:
    assert run(["status", "--json", "--watch"]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_a_watch_on_a_terminal_draws_the_table_and_then_says_how_the_run_ended(
    tmp_path: Path, pauses: Callable[[Callable[[int], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    said: list[str] = []
    with LiveRun(tmp_path / "a-1") as live, Terminal() as terminal:
        row = {"name": "held_out", "step": 2, "reward": 0.5, "rewards/right/mean": 0.25, "count": 3.0}
        (live.run_dir / "eval.jsonl").write_text(json.dumps(row) + '\n{"name": "half')

        def act(count: int) -> None:
            if count == 1:
                live.journal(ended("stopped by http"))
                live.end()

        pauses(act)
        watch(live.run_dir, tmp_path, out=terminal.stream, say=said.append)
        lines = lines_of(terminal.close())
    table = {line.split()[0]: line for line in lines if line}
    assert "r1" in table
    assert "4/10" in table["iterations"]
    assert "0.500" in table["reward"]
    assert "held_out after 2: reward 0.500, right 0.250" in table["evaluation"]
    assert "unit 3" in table["waiting"]
    assert any(line.startswith("state") and "stopped" in line for line in said)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_a_watch_but_not_the_run_and_leaves_the_terminal_with_its_cursor(
    tmp_path: Path,
    pauses: Callable[[Callable[[int], None]], None],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    before = signal.getsignal(number)
    said: list[str] = []
    with LiveRun(tmp_path / "a-1") as live, Terminal() as terminal:
        pauses(lambda _: signal.raise_signal(number))
        assert watch(live.run_dir, tmp_path, out=terminal.stream, say=said.append) == code
        written = terminal.close()
        assert not any(call[0] == "stop" for call in live.control.calls)
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1
    assert said == []
    assert signal.getsignal(number) is before


def test_a_watch_elsewhere_says_a_line_when_iterations_are_done(
    tmp_path: Path, pauses: Callable[[Callable[[int], None]], None]
) -> None:
    said: list[str] = []
    with LiveRun(tmp_path / "a-1") as live, (tmp_path / "out").open("w") as out:
        pauses(lambda count: live.end() if count == 3 else None)
        watch(live.run_dir, tmp_path, out=out, say=said.append)
    assert said[0] == "iteration 4/10  ROLLOUT  reward 0.500"
    assert said[1].startswith("run ")


def test_a_watch_bears_a_coordinator_that_is_silent_for_a_while_but_not_for_ever(
    tmp_path: Path, pauses: Callable[[Callable[[int], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with LiveRun(tmp_path / "a-1") as live, (tmp_path / "out").open("w") as out:
        live.control.error = WaitError("the coordinator did not answer")

        def act(count: int) -> None:
            if count == 1:
                live.control.error = None
            if count == 2:
                live.control.error = WaitError("the coordinator did not answer")
                monkeypatch.setattr(module, "_PATIENCE_S", 0.0)

        pauses(act)
        with pytest.raises(WaitError, match="did not answer"):
            watch(live.run_dir, tmp_path, out=out, say=said.append)
    assert said == ["iteration 4/10  ROLLOUT  reward 0.500"]


def test_start_asks_for_so_many_more(runs_dir: Path, capsys: Said) -> None:
    with LiveRun(runs_dir / "a-1") as live:
        assert run(["start", "7", "--run", "a-1"]) == 0
        assert live.control.calls == [("start", 7)]
    assert capsys.readouterr().out == "r1: 7 more; 4 iterations done of 10 wanted\n"


@pytest.mark.parametrize("arguments", [["start"], ["start", "0"], ["start", "many"]])
def test_start_wants_a_number(arguments: list[str], capsys: Said) -> None:
    assert run(arguments) == 2
    assert "Usage: rollplex start" in capsys.readouterr().err


def test_start_says_that_the_run_has_ended(runs_dir: Path, capsys: Said) -> None:
    leave(runs_dir / "a-1", started(), ended())
    assert run(["start", "7"]) == 1
    assert "not going on" in capsys.readouterr().err


GPU = "GPU 0 (NVIDIA H200, driver 580)"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {},
            f"{GPU}, shared by mps, 30 GiB of 140 GiB used by this run, 6 GiB of it beside leases",
        ),
        ({"used_bytes": None, "overhead_bytes": None}, f"{GPU}, shared by mps"),
        (
            {"sharing_used": "turns", "why": "not installed", "used_bytes": None, "overhead_bytes": None},
            f"{GPU}, shared by turns instead of mps (not installed)",
        ),
    ],
)
def test_a_gpu_is_told_with_how_it_is_shared_and_what_is_used(changes: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {
        "name": GPU,
        "sharing_asked": "mps",
        "sharing_used": "mps",
        "why": "",
        "total_bytes": 140 * 2**30,
        "used_bytes": 30 * 2**30,
        "overhead_bytes": 6 * 2**30,
    }
    assert _gpu(Gpu(**{**given, **changes})) == text


def test_a_tracker_is_told_with_where_its_numbers_go_or_why_they_do_not() -> None:
    ready = Tracker(name="wandb", state="ready", detail="offline, runs/1/wandb", dropped_rows=0)
    assert _tracker(ready) == "wandb ready: offline, runs/1/wandb"
    failed = Tracker(name="mlflow", state="failed", detail="no server", dropped_rows=3)
    assert _tracker(failed) == "mlflow failed: no server; 3 rows left out"


def test_a_restart_is_told_with_its_number_and_the_reason_of_the_last() -> None:
    restart = Restart(
        number=2,
        allowed=3,
        service="rollout[0:0]",
        how="the rollout service died: killed by SIGKILL",
        phase="TRAIN",
        step=4,
        wall_s=time.time() - 61.0,
        state="under way",
    )
    told = _restart(restart)
    assert told.startswith("2 of 3 (under way), the last 1 min 01 s ago: the rollout service died")
    assert told.endswith("killed by SIGKILL in TRAIN, step 4")
