"""The batch script: its directives, and what it does with a `rollplex` that notes how it is called."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from rollplex.config.job import DeadlinesSection

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "rollplex.sbatch"
ROLLPLEX = """#!/bin/sh
echo "$@" >>calls
case "$1" in
up) test ! -e stays || { touch up; while [ ! -e stopped ]; do sleep 0.02; done; touch ended; } ;;
stop) touch stopped; test ! -e waits || { while [ ! -e ended ]; do sleep 0.02; done; sleep "$(cat waits)"; }; exit 0 ;;
esac
exit "$(cat code 2>/dev/null || echo 0)"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the job is submitted."""
    program = tmp_path / ".venv" / "bin" / "rollplex"
    program.parent.mkdir(parents=True)
    program.write_text(ROLLPLEX)
    program.chmod(0o755)
    return tmp_path


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = {"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NAME": "mine", **variables}
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE, cwd=folder)


def run(folder: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    with start(folder, *arguments, **variables) as process:
        _, said = process.communicate(timeout=30)
    return process.returncode, said


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_it_is_sound_shell_with_directives_for_one_node() -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False, timeout=30).returncode == 0
    text = SCRIPT.read_text(encoding="utf-8")
    head, _, body = text.partition("set -euo pipefail")
    directives = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", head, re.MULTILINE))
    assert directives["nodes"] == directives["ntasks"] == directives["gpus-per-node"] == "1"
    assert "#SBATCH" not in body  # Slurm reads them only before the first command
    signal_name, before_s = directives["signal"].removeprefix("B:").split("@")
    assert signal_name == "USR1"
    assert "' USR1" in body
    assert int(before_s) >= DeadlinesSection().unit_s


def test_shellcheck_finds_nothing() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", str(SCRIPT)], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_first_job_begins_and_the_next_goes_on(folder: Path) -> None:
    assert run(folder, "my.yaml", "--iterations", "9")[0] == 0
    assert calls(folder) == ["up my.yaml --run-dir runs/slurm-mine --iterations 9"]
    (folder / "runs/slurm-mine/checkpoints/step_4").mkdir(parents=True)
    assert run(folder, "my.yaml")[0] == 0
    assert calls(folder)[1:] == ["up my.yaml --resume runs/slurm-mine"]


def test_the_code_of_the_run_is_that_of_the_job(folder: Path) -> None:
    (folder / "code").write_text("2")
    assert run(folder, "my.yaml")[0] == 2


@pytest.mark.parametrize("code", [0, 2])
@pytest.mark.parametrize("ends_meanwhile", [False, True])
def test_shortly_before_the_end_of_its_time_the_run_is_stopped_after_its_iteration(
    folder: Path, code: int, *, ends_meanwhile: bool
) -> None:
    (folder / "stays").touch()
    (folder / "code").write_text(str(code))
    if ends_meanwhile:
        (folder / "waits").write_text("0.5")
    with start(folder, "my.yaml") as process:
        end = time.monotonic() + 30
        while not (folder / "up").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
        process.communicate(timeout=30)
    assert process.returncode == code
    assert calls(folder)[1:] == ["stop --run runs/slurm-mine"]


def test_a_run_on_the_nodes_own_disk_is_copied_there_and_back(folder: Path) -> None:
    (folder / "kept/checkpoints/step_4").mkdir(parents=True)
    scratch = folder / "scratch"
    variables = {"ROLLPLEX_RUN_DIR": "kept", "ROLLPLEX_SCRATCH": str(scratch), "SLURM_JOB_ID": "7"}
    assert run(folder, "my.yaml", **variables)[0] == 0
    assert calls(folder) == [f"up my.yaml --resume {scratch}/rollplex-7"]
    assert not (scratch / "rollplex-7").exists()
    assert (folder / "kept/checkpoints/step_4").is_dir()


@pytest.mark.parametrize(("arguments", "says"), [((), "usage"), (("my.yaml",), "no elsewhere/bin/rollplex")])
def test_what_is_missing_is_said(folder: Path, arguments: tuple[str, ...], says: str) -> None:
    code, said = run(folder, *arguments, ROLLPLEX_VENV="elsewhere")
    assert code == 2
    assert says in said
