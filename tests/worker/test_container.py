"""A service in a container, with a container engine of the test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ENGINE = """#!/bin/sh
trap 'echo passed on >> {notes}; exit 9' TERM
echo "$@" >> {notes}
case "$1" in
run) sleep {seconds} & wait $!; exit 5;;
esac
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[[float], tuple[subprocess.Popen[bytes], Path]]:
    def begin(seconds: float) -> tuple[subprocess.Popen[bytes], Path]:
        engine, notes = tmp_path / "engine", tmp_path / "notes"
        engine.write_text(ENGINE.format(notes=notes, seconds=seconds))
        engine.chmod(0o755)
        words = ["rollplex.worker.container", str(engine), "--network", "none", "image", "--run-dir", "/r"]
        process = subprocess.Popen([sys.executable, "-m", *words])
        until(lambda: notes.exists() and "run" in notes.read_text())
        return process, notes

    return begin


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


Start = Callable[[float], tuple[subprocess.Popen[bytes], Path]]


def test_the_engine_runs_the_image_and_its_exit_code_is_the_containers(start: Start) -> None:
    process, notes = start(0.1)
    assert process.wait(30) == 5
    first = notes.read_text().splitlines()[0].split()
    assert first[:3] == ["run", "--rm", "--name"]
    assert first[4:] == ["--network", "none", "image", "--run-dir", "/r"]


def test_sigterm_is_passed_on(start: Start) -> None:
    process, notes = start(60)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 9
    assert "passed on" in notes.read_text()


def test_the_container_ends_with_its_process_even_if_that_is_killed(start: Start) -> None:
    process, notes = start(3)
    name = notes.read_text().split()[3]
    os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    until(lambda: f"kill {name}" in notes.read_text())
