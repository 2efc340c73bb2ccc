"""`rollplex up --dry-run`: nothing is left behind, and what is said is what a real start would say."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rollplex.cli import dry_run as module
from rollplex.cli.app import run
from rollplex.cli.start import Prepared, coordinator_command
from rollplex.config import load
from rollplex.protocol.claim import claim

_STAND_IN = """
import os, sys
from pathlib import Path
from rollplex.config import load
run_dir, code = Path(sys.argv[1]), int(sys.argv[2])
assert load(run_dir / "config.yaml").run.seed == 7
(run_dir / "logs").mkdir()
(run_dir / "logs" / "reward.log").write_text("".join(f"line {n}\\n" for n in range(30)))
(run_dir / "logs" / "input.log").touch()
sys.exit(code)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def check(config_file: Path, temporary: Path) -> Callable[[int], tuple[int, list[str]]]:
    """A dry run whose coordinator is a stand-in that ends with this code."""

    def check(code: int) -> tuple[int, list[str]]:
        said: list[str] = []

        def command(prepared: Prepared) -> list[str]:
            assert prepared.run_dir.is_relative_to(temporary)
            return [sys.executable, "-c", _STAND_IN, str(prepared.run_dir), str(code)]

        found = module.dry_run(
            config_file, ["run.seed=7"], None, iterations=3, serve=False, say=said.append, command=command
        )
        return found, said

    return check


@pytest.mark.parametrize("code", [0, 2, 130])
def test_the_exit_code_is_the_coordinators_and_nothing_is_left(
    check: Callable[[int], tuple[int, list[str]]], temporary: Path, code: int
) -> None:
    assert check(code) == (code, [])
    assert list(temporary.iterdir()) == []


def test_a_failure_shows_the_last_lines_of_logs_that_are_about_to_go(
    check: Callable[[int], tuple[int, list[str]]], temporary: Path
) -> None:
    code, said = check(1)
    assert code == 1
    assert said == ["last lines of the reward process:", *(f"  line {n}" for n in range(20, 30))]
    assert list(temporary.iterdir()) == []


def test_a_signal_while_things_are_removed_does_not_keep_them(
    check: Callable[[int], tuple[int, list[str]]], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def interrupted(folder: Path) -> None:
        signal.raise_signal(signal.SIGINT)
        remove(folder)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert check(0)[0] == 130
    assert list(temporary.iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is before


def test_the_command_starts_the_real_coordinator_with_what_was_asked(
    config_file: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def child(command: list[str], **_: object) -> int:
        seen.append(command)
        return 0

    monkeypatch.setattr(module, "run_child", child)
    assert run(["up", str(config_file), "--dry-run", "--iterations", "3", "--serve"]) == 0
    assert seen[0][1:4] == ["-P", "-m", "rollplex_coordinator"]
    assert seen[0][-5:] == ["--iterations", "3", "--serve", "--die-with-parent", "--dry-run"]
    assert list(temporary.iterdir()) == []


def test_a_run_directory_that_could_not_be_used_is_refused(
    config_file: Path, tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", str(config_file), "--dry-run", "--run-dir", str(tmp_path / ("x" * 100))]) == 2
    assert "too long for a unix socket" in capsys.readouterr().err
    with claim(tmp_path / "r", "first"):
        assert run(["up", str(config_file), "--dry-run", "--run-dir", str(tmp_path / "r")]) == 2
    assert "Another coordinator holds this run directory" in capsys.readouterr().err


def test_a_wrong_configuration_is_refused_as_ever_and_leaves_nothing(
    config_file: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", str(config_file), "--dry-run", "--set", "run.sede=1"]) == 2
    assert "Did you mean run.seed?" in capsys.readouterr().err
    assert list(temporary.iterdir()) == []


def test_a_resumed_run_is_never_started_in_place_of_a_dry_one(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim(runs_dir / "a-1", "r1").release()
    assert run(["up", "--resume", "a-1", "--dry-run"]) == 2
    assert "does not go with --resume" in " ".join(capsys.readouterr().err.split())


def test_a_real_start_has_no_such_option(config_file: Path, tmp_path: Path) -> None:
    prepared = Prepared(config=load(config_file), config_file=config_file, run_dir=tmp_path)
    assert "--dry-run" not in coordinator_command(prepared)
