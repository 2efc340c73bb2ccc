"""Workers that nobody supervises, as in containers: they find the run directory by themselves and leave with code 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollplex.journal.events import ServiceStarted, StopRequested
from support.nodes import Start, handles_terms
from support.warm import COLD, worker_environment

ROLES = ("trainer", "prefix", "rollout")
Worker = Callable[..., subprocess.Popen[bytes]]
"""worker(role, run_dir, env=…): one that starts as a container's does, unless told otherwise."""


@pytest.fixture
def worker() -> Iterator[Worker]:
    """Starts one worker as a container would."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(role: str, run_dir: Path, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        log = run_dir.with_name(f"{run_dir.name}.{role}.log")
        with log.open("wb") as file:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", f"rollplex_{role}", "--run-dir", str(run_dir)],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=env or {**os.environ, **COLD},
                )
            )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait(timeout=10)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("by", "source"), [("http", "http"), ("SIGTERM to a worker", "SIGTERM to prefix[0:0]")])
def test_external_workers_are_waited_for_and_leave_with_code_0(
    start: Start, worker: Worker, by: str, source: str
) -> None:
    node = start("--serve", "--external-workers")
    env = worker_environment() if by == "http" else None
    workers = {role: worker(role, node.run_dir, env) for role in ROLES}
    with node.api() as api:
        node.until(lambda: api.get("/status").json()["phase"] == "IDLE", "idleness")
        if by == "http":
            api.post("/stop", json={"when": "now", "exit": True}).raise_for_status()
    if by != "http":
        workers["prefix"].send_signal(signal.SIGTERM)
    done = node.wait(20)
    assert done.code == 0, done.stderr
    assert "did not leave in time" not in done.stderr
    assert {role: process.wait(timeout=5) for role, process in workers.items()} == dict.fromkeys(ROLES, 0)
    assert {s.role for s in done.of(ServiceStarted)} >= set(ROLES)
    assert done.of(StopRequested)[-1].source == source


@pytest.mark.timeout(150)
def test_the_death_of_an_external_worker_is_an_error_that_names_no_log_that_is_not_there(
    start: Start, worker: Worker
) -> None:
    node = start("--serve", "--external-workers")
    workers = {role: worker(role, node.run_dir, worker_environment()) for role in ROLES}
    node.until(lambda: "data train" in node.stderr, "the data")
    workers["rollout"].kill()
    done = node.wait(60)
    assert done.code == 1
    assert "the rollout service died" in done.stderr
    assert "the log of its container" in done.stderr
    assert "logs/rollout.log" not in done.stderr
    assert {role: process.wait(timeout=5) for role, process in workers.items()} == {
        "trainer": 0,
        "prefix": 0,
        "rollout": -signal.SIGKILL,
    }


def test_a_worker_without_a_coordinator_leaves_when_told_to(tmp_path: Path, worker: Worker) -> None:
    process = worker("rollout", tmp_path / "run")
    end = time.monotonic() + 30
    while not handles_terms(process):
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 0
