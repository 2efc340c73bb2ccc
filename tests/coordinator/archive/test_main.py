"""`rollplex history`: a server over past runs, as a process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from rollplex.cli import start
from rollplex.cli.app import run
from rollplex.stop_signals import STOP_SIGNALS
from rollplex_coordinator.archive.__main__ import main
from support.past_runs import write_run


def test_it_serves_until_it_is_told_to_end_and_leaves_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", steps=1)
    process = subprocess.Popen(
        [sys.executable, "-m", "rollplex_coordinator.archive", str(tmp_path / "runs")],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url, token = process.stdout.readline().split()[0], Path(process.stdout.readline().split()[1])
        headers = {"Authorization": f"Bearer {token.read_text().strip()}"}
        with httpx.Client(base_url=url, headers=headers, timeout=20, trust_env=False) as client:
            assert [found["name"] for found in client.get("/runs").json()] == ["a"]
            assert client.get("/status").status_code == 404
            assert client.post("/stop", json={"when": "now"}).status_code == 404
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert not token.parent.exists()
        assert not (tmp_path / "runs" / "token").exists()
    finally:
        process.kill()
        process.communicate()


def test_a_folder_that_is_not_there_is_a_wrong_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main([str(tmp_path / "nothing")]) == 2
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    assert "no such folder of runs" in capsys.readouterr().err


def test_the_command_takes_the_runs_folder_or_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(start, "become", became.append)
    monkeypatch.setenv("ROLLPLEX_RUNS_DIR", str(tmp_path))
    assert run(["history"]) == 0
    assert run(["history", "elsewhere", "--port", "8000"]) == 0
    module = ["-P", "-m", "rollplex_coordinator.archive"]
    assert [command[1:] for command in became] == [
        [*module, str(tmp_path), "--port", "0"],
        [*module, "elsewhere", "--port", "8000"],
    ]
