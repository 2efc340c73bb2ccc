"""`rollplex up`: from arguments to the coordinator's command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollplex.cli.app import run
from rollplex.config import load
from rollplex.protocol.claim import claim
from rollplex.stop_signals import STOP_SIGNALS


class _ExecError(Exception):
    """Stands for the end of this program by exec."""


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The command lines that this process would have become."""
    calls: list[list[str]] = []

    def execv(path: str, arguments: list[str]) -> None:
        assert path == sys.executable == arguments[0]
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == {*STOP_SIGNALS}
        calls.append(arguments[1:])
        raise _ExecError

    monkeypatch.setattr(os, "execv", execv)
    yield calls
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _up(*arguments: object) -> None:
    with pytest.raises(_ExecError):
        run(["up", *map(str, arguments)])


def test_the_coordinator_gets_the_resolved_configuration_and_the_run_directory(
    executed: list[list[str]], config_file: Path, tmp_path: Path
) -> None:
    _up(config_file, "--run-dir", tmp_path / "r", "--set", "run.seed=7", "--set", "rollout.group_size=4")
    resolved = tmp_path / "r/config.yaml"
    assert executed == [
        ["-P", "-m", "rollplex_coordinator", "--config", str(resolved), "--run-dir", str(tmp_path / "r")],
    ]
    assert load(resolved) == load(config_file, ["run.seed=7", "rollout.group_size=4"])
    assert load(resolved).run.seed == 7


def test_iterations_and_serve_are_passed_on(executed: list[list[str]], config_file: Path, tmp_path: Path) -> None:
    _up(config_file, "--run-dir", tmp_path / "r", "--iterations", 5, "--serve")
    assert executed[0][-3:] == ["--iterations", "5", "--serve"]


def test_a_relative_run_directory_is_made_absolute(
    executed: list[list[str]], config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _up("job.yaml", "--run-dir", "r")
    assert executed[0][-1] == str(tmp_path / "r")


def test_each_run_without_a_directory_gets_a_new_one_by_its_name(
    executed: list[list[str]], config_file: Path, runs_dir: Path
) -> None:
    _up(config_file)
    _up(config_file)
    folders = [Path(arguments[-1]) for arguments in executed]
    assert len(set(folders)) == 2
    for folder in folders:
        assert folder.parent == runs_dir
        assert folder.name.startswith("job-")
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "config.yaml").is_file()


def test_a_run_directory_can_be_used_again_after_its_run(
    executed: list[list[str]], config_file: Path, tmp_path: Path
) -> None:
    _up(config_file, "--run-dir", tmp_path / "r")
    _up(config_file, "--run-dir", tmp_path / "r", "--set", "run.seed=2")
    assert load(tmp_path / "r/config.yaml").run.seed == 2


def test_the_configuration_of_a_run_that_is_going_on_is_not_touched(
    executed: list[list[str]], config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with claim(tmp_path / "r", "first"):
        (tmp_path / "r/config.yaml").write_text("its own")
        assert run(["up", str(config_file), "--run-dir", str(tmp_path / "r")]) == 2
        assert (tmp_path / "r/config.yaml").read_text() == "its own"
    assert f"pid {os.getpid()}" in capsys.readouterr().err
    assert executed == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["none.yaml"], "error: none.yaml: The configuration cannot be read"),
        (["job.yaml", "--set", "run.sede=1"], "Did you mean run.seed?"),
        (["job.yaml", "--set", "run.seed"], "not of the form"),
        (["job.yaml", "--run-dir", "x" * 100], "too long for a unix socket"),
        (["job.yaml", "--run-dir", "job.yaml"], "error:"),
    ],
)
def test_a_configuration_that_cannot_run_is_one_line_and_code_two(
    executed: list[list[str]],
    config_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    part: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["up", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert part in err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert executed == []


@pytest.mark.parametrize(
    "arguments", [["up"], ["up", "a", "b"], ["up", "a", "--iterations", "0"], ["up", "a", "--iterations", "x"], ["upp"]]
)
def test_a_wrong_command_line_is_explained_and_code_two(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    err = capsys.readouterr().err
    assert "Usage: rollplex" in err
    assert "Traceback" not in err


def test_the_surface_of_the_command_line_is_the_known_one(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, set[str]] = {}
    for command in ("up", "demo", "status", "start", "stop", "down", "logs", "runs", "doctor", "plan", "config show"):
        assert run([*command.split(), "--help"]) == 0
        words = capsys.readouterr().out.replace(",", " ").split()
        options[command] = {word for word in words if word.startswith("--")} - {"--help"}
    assert options == {
        "up": {"--iterations", "--set", "--run-dir", "--serve", "--dry-run", "--resume", "--accept"},
        "demo": {"--quick", "--dir"},
        "status": {"--json", "--watch"},
        "start": {"--run"},
        "stop": {"--run", "--now", "--stay", "--wait"},
        "down": {"--run", "--all", "--grace"},
        "logs": {"--run", "--follow", "--lines"},
        "runs": {"--json"},
        "doctor": {"--json"},
        "plan": {
            *(
                "--set",
                "--shape",
                "--gpus",
                "--train-tp",
                "--rollout-tp",
                "--rollout-gpus",
                "--hbm",
                "--json",
                "--plot",
            ),
            *("--prompt-tokens", "--image-tokens", "--response-tokens", "--micro-batch", "--baseline-gradients"),
            "--optimizer",
        },
        "config show": {"--set"},
    }


def test_the_installed_command_ends_with_the_code_and_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from rollplex.cli import main; sys.exit(main())", "up", "none.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == "error: none.yaml: The configuration cannot be read; got No such file or directory\n"


def test_the_command_line_imports_no_torch_and_no_service() -> None:
    code = (
        "import sys, rollplex.cli.app, rollplex.cli.start, rollplex.cli.demo;"
        "found = {m.partition('.')[0] for m in sys.modules};"
        "sys.exit(any(m in ('torch', 'transformers') or m.startswith('rollplex_') for m in found))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_help_imports_nothing_that_takes_time() -> None:
    code = (
        "import sys, rollplex.cli.app;"
        "slow = {'pydantic', 'httpx', 'rich', 'numpy', 'zmq', 'msgspec', 'sqlite3', 'yaml'};"
        "sys.exit(', '.join(slow & {m.partition('.')[0] for m in sys.modules}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_coordinator_that_cannot_be_started_is_an_error(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    try:
        assert run(["up", str(config_file), "--run-dir", str(tmp_path / "r")]) == 1
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    assert "The coordinator cannot be started" in capsys.readouterr().err


def test_latest_in_the_runs_folder_leads_to_the_newest_run_there(
    executed: list[list[str]], config_file: Path, runs_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _up(config_file)
    first = Path(executed[-1][-1])
    assert (runs_dir / "latest").readlink() == Path(first.name)
    _up(config_file, "--run-dir", tmp_path / "elsewhere")
    assert (runs_dir / "latest").resolve() == first
    _up(config_file, "--run-dir", runs_dir / "demo" / "run")
    assert (runs_dir / "latest").readlink() == Path("demo/run")
    (runs_dir / "latest").unlink()
    (runs_dir / "latest").mkdir()
    _up(config_file)
    assert "is no link and is left alone" in capsys.readouterr().err


def test_a_run_in_the_latest_directory_keeps_it_when_another_becomes_the_latest(
    executed: list[list[str]], config_file: Path, runs_dir: Path
) -> None:
    _up(config_file)
    _up(config_file, "--run-dir", runs_dir / "latest")
    assert executed[1][-1] == executed[0][-1]
    assert (runs_dir / "latest").readlink() == Path(Path(executed[0][-1]).name)
