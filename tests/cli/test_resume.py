"""`rollplex up --resume`: from arguments to the coordinator's command line."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollplex.cli.app import run
from rollplex.cli.resume import meant
from rollplex.stop_signals import STOP_SIGNALS


class _ExecError(Exception):
    """Stands for the end of this program by exec."""


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The command lines that this process would have become."""
    calls: list[list[str]] = []

    def execv(path: str, arguments: list[str]) -> None:
        assert path == sys.executable == arguments[0]
        calls.append(arguments[1:])
        raise _ExecError

    monkeypatch.setattr(os, "execv", execv)
    yield calls
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@pytest.fixture
def run_dir(tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with its configuration, in the runs folder."""
    folder = tmp_path / "runs" / "mine"
    monkeypatch.setenv("ROLLPLEX_RUNS_DIR", str(folder.parent))
    (folder / "checkpoints/step_3").mkdir(parents=True)
    (folder / "checkpoints/latest").symlink_to("step_3")
    (folder / "journal.sqlite").write_bytes(b"")
    text = config_file.read_text(encoding="utf-8")
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    for path in config_file.parent.iterdir():
        if path != config_file and not (folder / path.name).exists() and path.name != "runs":
            (folder / path.name).symlink_to(path)
    return folder


def test_a_run_goes_on_with_its_own_configuration_and_what_was_asked_for(
    executed: list[list[str]], run_dir: Path
) -> None:
    with pytest.raises(_ExecError):
        run(["up", "--resume", "mine", "--set", "run.schedule=serial", "--accept", "data.train", "--iterations", "9"])
    assert executed == [
        [
            *("-P", "-m", "rollplex_coordinator", "--config", str(run_dir / "config.yaml"), "--run-dir", str(run_dir)),
            *("--resume", "--set", "run.schedule=serial", "--accept", "data.train", "--iterations", "9"),
        ]
    ]


def test_a_checkpoint_and_another_configuration_can_be_named(
    executed: list[list[str]], run_dir: Path, config_file: Path
) -> None:
    with pytest.raises(_ExecError):
        run(["up", str(config_file), "--resume", str(run_dir / "checkpoints/step_3"), "--serve"])
    (command,) = executed
    assert command[4] == str(config_file)
    assert command[7:] == ["--resume", str(run_dir / "checkpoints/step_3"), "--serve"]


def test_the_link_to_the_newest_checkpoint_means_what_it_leads_to(run_dir: Path) -> None:
    assert meant(run_dir / "checkpoints/latest") == (run_dir, run_dir / "checkpoints/step_3")
    assert meant(run_dir) == (run_dir, None)


def test_a_configuration_that_cannot_run_is_refused_before_anything_starts(
    executed: list[list[str]], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", "--resume", "mine", "--set", "run.sede=1"]) == 2
    assert "run.sede" in capsys.readouterr().err
    assert run(["up", "--resume", "nowhere"]) == 2
    assert "There is no such run" in capsys.readouterr().err
    assert executed == []
