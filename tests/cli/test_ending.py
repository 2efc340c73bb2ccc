"""`rollplex stop` and `rollplex down`: by the API, by signals, and never to a process that is not the run's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollplex.cli import ending
from rollplex.cli.app import run
from rollplex.errors import RollplexError, WaitError
from rollplex.journal.events import StopWhen
from rollplex.protocol.claim import holder_of
from support.runs import LiveRun, done, ended

Said = pytest.CaptureFixture[str]
_HOLD = """
import signal, sys, time
from pathlib import Path
from typing import Any
from rollplex.protocol.claim import claim
if sys.argv[2] == "ignore":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = claim(Path(sys.argv[1]), "r1")
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Let something happen, instead of time, whenever the end is waited for."""

    def happen(act: Callable[[], None]) -> None:
        monkeypatch.setattr(ending, "time", SimpleNamespace(sleep=lambda _: act(), monotonic=time.monotonic))

    return happen


@pytest.fixture
def hold(runs_dir: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A process that holds the run a-1 and never answers; by default it looks like a coordinator."""
    children = []

    def start(signals: str = "obey", name: str = ending.PROGRAM) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _HOLD, str(runs_dir / "a-1"), signals, name]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate(timeout=20)


# --- stop ---------------------------------------------------------------------------------------------------------


def test_stop_ends_the_run_after_its_iteration_and_says_what_there_is_to_go_on_from(
    runs_dir: Path, capsys: Said, pauses: Callable[[Callable[[], None]], None]
) -> None:
    with LiveRun(runs_dir / "a-1") as live:

        def end() -> None:
            live.journal(done(4), ended("done"))
            (live.run_dir / "checkpoints" / "step_5").mkdir(parents=True)
            live.end()

        pauses(end)
        assert run(["stop"]) == 0
        assert live.control.calls == [("stop", StopWhen.AFTER_ITERATION, True)]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "r1 stops after this iteration"
    assert lines[1] == f"done after 5 iterations; newest checkpoint: {runs_dir / 'a-1/checkpoints/step_5'}"


def test_stop_now_asks_for_now(runs_dir: Path, pauses: Callable[[Callable[[], None]], None]) -> None:
    with LiveRun(runs_dir / "a-1") as live:
        pauses(live.end)
        assert run(["stop", "--now"]) == 0
        assert live.control.calls == [("stop", StopWhen.NOW, True)]


def test_stop_without_waiting_returns_at_once(runs_dir: Path, capsys: Said) -> None:
    with LiveRun(runs_dir / "a-1"):
        assert run(["stop", "--wait", "0"]) == 0
        assert capsys.readouterr().out == "r1 stops after this iteration\n"


def test_a_run_that_has_not_ended_in_time_is_an_error_that_says_what_to_do(runs_dir: Path, capsys: Said) -> None:
    with LiveRun(runs_dir / "a-1"):
        assert run(["stop", "--wait", "0.01"]) == 1
    assert "has not ended yet; got it still goes on after 0.01 s" in capsys.readouterr().err


def test_stop_and_stay_waits_until_the_node_is_idle(
    runs_dir: Path, capsys: Said, pauses: Callable[[Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LiveRun(runs_dir / "a-1") as live:
        status = live.control._status()
        idle = status.model_copy(update={"phase": "IDLE", "iterations_done": 10})
        pauses(lambda: monkeypatch.setattr(live.control, "_status", lambda: idle))
        assert run(["stop", "--stay"]) == 0
        assert live.control.calls[0] == ("stop", StopWhen.AFTER_ITERATION, False)
        assert "it waits after 10 iterations" in capsys.readouterr().out
        monkeypatch.setattr(live.control, "_status", lambda: status)
        with pytest.raises(WaitError, match="still iterates; got phase ROLLOUT"):
            ending.stay(live.run_dir, wait_s=1e-9, say=print)


def test_stop_refuses_what_cannot_be(runs_dir: Path, capsys: Said) -> None:
    assert run(["stop", "--now", "--stay"]) == 2
    assert "exclude each other" in capsys.readouterr().err
    assert run(["stop", "--wait", "-1"]) == 2


# --- down ---------------------------------------------------------------------------------------------------------


def test_down_stops_the_run_now(runs_dir: Path, capsys: Said, pauses: Callable[[Callable[[], None]], None]) -> None:
    with LiveRun(runs_dir / "a-1") as live:
        pauses(live.end)
        assert run(["down"]) == 0
        assert live.control.calls == [("stop", StopWhen.NOW, True)]
    assert capsys.readouterr().out == f"{runs_dir / 'a-1'}: stopped\n"


@pytest.mark.parametrize("arguments", [[], ["--all"], ["--run", "a-1"]])
def test_down_without_a_live_run_has_nothing_to_do(runs_dir: Path, capsys: Said, arguments: list[str]) -> None:
    with LiveRun(runs_dir / "a-1"):
        pass
    assert run(["down", *arguments]) == 0
    assert "nothing is running" in capsys.readouterr().out


def test_down_does_not_guess_which_of_several_is_meant_but_all_means_all(
    runs_dir: Path, capsys: Said, pauses: Callable[[Callable[[], None]], None]
) -> None:
    with LiveRun(runs_dir / "a-1") as one, LiveRun(runs_dir / "a-2") as other:
        assert run(["down"]) == 2
        assert "Several runs are going on; got a-1, a-2" in capsys.readouterr().err
        assert one.control.calls == other.control.calls == []
        left = [one, other]
        pauses(lambda: left.pop(0).end())
        assert run(["down", "--all"]) == 0
        assert capsys.readouterr().out.count("stopped") == 2


def test_down_of_all_goes_on_after_one_that_cannot_be_ended_and_tells(
    runs_dir: Path, capsys: Said, pauses: Callable[[Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ending.down

    def down(run_dir: Path, **options: Any) -> None:
        if run_dir.name == "a-1":
            raise RollplexError("This run is held on another host", where=str(run_dir))
        real(run_dir, **options)

    monkeypatch.setattr(ending, "down", down)
    with LiveRun(runs_dir / "a-1"), LiveRun(runs_dir / "a-2") as other:
        pauses(other.end)
        assert run(["down", "--all"]) == 1
        assert other.control.calls == [("stop", StopWhen.NOW, True)]
    out = capsys.readouterr().out
    assert f"error: {runs_dir / 'a-1'}: This run is held on another host" in out
    assert f"{runs_dir / 'a-2'}: stopped" in out


def test_a_coordinator_that_does_not_answer_gets_sigterm(
    runs_dir: Path, capsys: Said, hold: Callable[..., subprocess.Popen[str]]
) -> None:
    child = hold()
    assert run(["down"]) == 0
    assert child.wait(timeout=20) == -signal.SIGTERM
    out = capsys.readouterr().out
    assert "the control API cannot be used" in out
    assert f"ended by SIGTERM to pid {child.pid}" in out


def test_one_that_does_not_obey_is_killed_after_the_grace_time(
    runs_dir: Path, capsys: Said, hold: Callable[..., subprocess.Popen[str]]
) -> None:
    child = hold("ignore")
    assert run(["down", "--grace", "0.2"]) == 0
    assert child.wait(timeout=20) == -signal.SIGKILL
    out = capsys.readouterr().out
    assert "SIGTERM to pid" in out
    assert f"ended by SIGKILL to pid {child.pid}" in out


def test_another_program_is_never_signalled(
    runs_dir: Path, capsys: Said, hold: Callable[..., subprocess.Popen[str]]
) -> None:
    child = hold(name="something_else")
    assert run(["down"]) == 1
    assert "not its coordinator" in capsys.readouterr().err
    assert child.poll() is None


def test_a_note_that_names_another_coordinator_leads_to_no_signal(
    runs_dir: Path, capsys: Said, hold: Callable[..., subprocess.Popen[str]]
) -> None:
    other = hold()
    with LiveRun(runs_dir / "b-1") as live:
        (live.run_dir / "http.json").unlink()
        note = (runs_dir / "a-1" / "coordinator.lock").read_text()
        (live.run_dir / "coordinator.lock").write_text(note)
        assert run(["down", "--run", "b-1"]) == 1
        assert "does not have" in capsys.readouterr().err
    assert other.poll() is None


def test_a_coordinator_of_another_host_is_left_alone(
    runs_dir: Path, capsys: Said, hold: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = hold()
    monkeypatch.setattr("rollplex.cli.ending.socket.gethostname", lambda: "elsewhere")
    assert run(["down"]) == 1
    err = capsys.readouterr().err
    assert "held on another host, or in a container" in err
    assert "docker compose down" in err
    assert child.poll() is None


def test_one_that_ended_meanwhile_is_fine(runs_dir: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveRun(runs_dir / "a-1") as live:
        (live.run_dir / "http.json").unlink()
        holder = holder_of(live.run_dir)
        assert holder is not None

        def vanish(pid: int) -> int:
            assert pid == holder.pid == os.getpid()
            live.end()
            raise ProcessLookupError

        monkeypatch.setattr(os, "pidfd_open", vanish)
        assert run(["down"]) == 0
    assert "ended meanwhile" in capsys.readouterr().out
