"""`rollplex services`, `rollplex swap` and `rollplex conformance`, on the command line's side."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rollplex.cli.app import run
from rollplex.cli.services import program_of
from rollplex.errors import ConfigError, StateError
from rollplex.protocol.common import Role
from rollplex_coordinator.http.views import ServiceView, SwapView
from support.runs import LiveRun


def test_services_says_state_incarnation_since_when_and_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LiveRun(tmp_path / "a-1") as live:
        ours = ServiceView(
            service="rollout[0:0]",
            role=Role.ROLLOUT,
            device="0:0",
            incarnation=2,
            pid=9,
            state="ready",
            command=("serve", "a model"),
            since_wall_s=1.0,
        )
        monkeypatch.setattr(live.control, "services", lambda: (*type(live.control).services(live.control), ours))
        assert run(["services", str(live.run_dir)]) == 0
        heading, trainer, _, rollout = capsys.readouterr().out.splitlines()
        assert heading.split() == ["service", "state", "incarnation", "pid", "since", "program"]
        assert trainer.split()[:4] == ["trainer[0:0]", "busy", "1", "7"]
        assert "(not started here)" in trainer
        assert rollout.split()[:4] == ["rollout[0:0]", "ready", "2", "9"]
        assert rollout.endswith("serve 'a model'")
        assert run(["services", str(live.run_dir), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[2]["command"] == ["serve", "a model"]


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ({"state": "swapped", "step": 3}, 0, "rollout has been replaced; from iteration 4 on"),
        (
            {"state": "refused", "case": "drain", "got": "a unit", "needed": "none"},
            1,
            "rollout stays: refused by drain: got a unit; needed none",
        ),
    ],
)
def test_swap_waits_for_what_becomes_of_it(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    end: dict[str, object],
    code: int,
    words: str,
) -> None:
    with LiveRun(tmp_path / "a-1") as live:
        plain = live.control.status()
        view = SwapView(role=Role.ROLLOUT, command=("x",), **end)  # type: ignore[arg-type] # by name
        monkeypatch.setattr(live.control, "status", lambda: plain.model_copy(update={"swap": view}))
        assert run(["swap", "--run", str(live.run_dir), "rollout", sys.executable, "-m", "serve", "--fast"]) == code
        assert words in capsys.readouterr().out
        assert live.control.calls[-1] == ("swap", Role.ROLLOUT, (sys.executable, "-m", "serve", "--fast"))
        assert run(["swap", "--run", str(live.run_dir), "--no-wait", "rollout", sys.executable]) == 0


def test_a_swap_that_the_run_refuses_is_told_in_its_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LiveRun(tmp_path / "a-1") as live:
        live.control.error = StateError("this service cannot be replaced", got="trainer", needed="one device")
        assert run(["swap", "--run", str(live.run_dir), "trainer", sys.executable]) == 1
        assert "this service cannot be replaced; got trainer" in capsys.readouterr().err


def test_a_program_that_is_nowhere_is_an_image_if_there_is_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config_file: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(ConfigError, match="Neither such a program nor a container engine is here"):
        program_of(["team/rollout:2"], tmp_path)
    with pytest.raises(ConfigError, match="There is no such program"):
        program_of(["/no/such/program"], tmp_path)
    with pytest.raises(ConfigError, match="There is no such program"):
        program_of(["serve", "--fast"], tmp_path)
    (tmp_path / "bin").mkdir()
    engine = tmp_path / "bin" / "docker"
    engine.write_text("#!/bin/sh\n")
    engine.chmod(0o755)
    (tmp_path / "config.yaml").write_text(config_file.read_text())
    command = program_of(["team/rollout:2"], tmp_path)
    assert command[1:5] == ["-P", "-m", "rollplex.worker.container", str(engine)]
    assert command[-1] == "team/rollout:2"
    assert command[command.index("--pull") + 1] == "never", "a misspelt program must not become a download"
    assert f"{tmp_path}:{tmp_path}" in command
    assert f"{tmp_path / 'model'}:{tmp_path / 'model'}:ro" in command
    assert program_of([str(engine), "--x"], tmp_path) == [str(engine), "--x"]
    monkeypatch.chdir(tmp_path)
    assert program_of([str(engine), "config.yaml"], tmp_path) == [str(engine), str(tmp_path / "config.yaml")]


def test_conformance_hands_the_program_its_own_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import rollplex.cli.conformance as module

    seen: list[list[str]] = []

    def child(command: list[str], **_: object) -> int:
        seen.append(command)
        return 1

    monkeypatch.setattr(module, "run_child", child)
    report = tmp_path / "report.json"
    options = ["--json", str(report), "--case", "drain", "--stop"]
    assert run(["conformance", *options, "rollout", "serve", "--fast", "--json", "x"]) == 1
    (command,) = seen
    assert command[1:] == [
        *("-P", "-m", "rollplex.conformance", "--json", str(report), "--case", "drain", "--stop"),
        *("rollout", "--", "serve", "--fast", "--json", "x"),
    ]
    assert run(["conformance", "--json", str(tmp_path / "none" / "x.json"), "rollout", "serve"]) == 2
    assert "The folder of the report is not there" in capsys.readouterr().err
