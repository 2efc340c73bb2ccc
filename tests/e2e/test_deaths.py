"""A dead worker ends a run without restarts with an error that names it; a dead coordinator leaves nobody; signals end
quietly. With restarts: test_restart."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from rollplex.journal.events import ErrorRaised, RunEnded, ServiceDied
from support.nodes import Node, Start, handles_terms, run_processes
from support.warm import COLD

ENDLESS = {"run.iterations": 100000, "run.restarts": 0}


def running(start: Start, env: dict[str, str] | None = None) -> Node:
    node = start("--iterations", "100000", overrides=ENDLESS, env=env)
    node.until_iterations(1)
    return node


def gone(run_dir: Path, deadline_s: float) -> bool:
    end = time.monotonic() + deadline_s
    while run_processes(run_dir) and time.monotonic() < end:
        time.sleep(0.05)
    return not run_processes(run_dir)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("role", "env"), [("rollout", {}), ("prefix", {}), ("trainer", COLD)])
def test_a_killed_worker_ends_the_run_within_two_seconds_with_an_error_that_names_it(
    start: Start, role: str, env: dict[str, str]
) -> None:
    node = running(start, env)
    os.kill(node.worker(role), signal.SIGKILL)
    killed_s = time.monotonic()
    node.until(lambda: "error:" in node.stderr or node.process.poll() is not None, "an error", 2.0)
    assert time.monotonic() - killed_s < 2.0
    done = node.wait(15)
    assert done.code == 1
    _, _, text = done.stderr.partition("error:")
    for part in (f"the {role} service died", "killed by SIGKILL", "phase ", "step ", f"logs/{role}.log"):
        assert part in text, done.stderr
    assert "Traceback" not in done.stderr
    died = done.of(ServiceDied)
    assert [d.role for d in died] == [role]
    (raised,) = done.of(ErrorRaised)
    if raised.phase in {"ROLLOUT", "SCORE"}:
        assert raised.group is not None
        assert "not trained yet" in text
    assert [e.exit_code for e in done.of(RunEnded)] == [1]
    assert gone(node.run_dir, 1.0)


@pytest.mark.timeout(150)
def test_a_killed_coordinator_leaves_no_process_and_the_next_run_in_its_directory_works(start: Start) -> None:
    node = running(start)
    os.kill(node.pids()["coordinator"], signal.SIGKILL)
    node.process.wait(timeout=10)
    assert gone(node.run_dir, 10.0), run_processes(node.run_dir)
    again = start("--iterations", "1", run_dir=node.run_dir).wait()
    assert again.code == 0, again.stderr


@pytest.mark.timeout(200)
@pytest.mark.parametrize("moment_s", [0.0, 0.7, 2.2, 4.7])
def test_an_interrupt_while_the_node_starts_ends_everything_quietly(start: Start, moment_s: float) -> None:
    node = start("--iterations", "100000", overrides=ENDLESS, env=COLD)
    node.until(lambda: handles_terms(node.process), "handling of signals")  # the first that it does, but after Python
    time.sleep(moment_s)
    node.process.send_signal(signal.SIGINT)
    done = node.wait(10)
    assert (done.code, "Traceback" in done.stderr) == (130, False), done.stderr
    assert gone(node.run_dir, 1.0)


@pytest.mark.timeout(100)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_a_signal_during_an_iteration_ends_everything_quietly(start: Start, number: signal.Signals, code: int) -> None:
    node = running(start)
    node.process.send_signal(number)
    done = node.wait(10)
    assert (done.code, "Traceback" in done.stderr) == (code, False), done.stderr
    assert gone(node.run_dir, 1.0)
    assert json.loads((node.run_dir / "metrics.jsonl").read_text().splitlines()[0])["step"] == 0


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("role", "env"), [("trainer", {}), ("rollout", COLD)])
def test_an_interrupt_ends_a_run_whose_worker_hangs(start: Start, role: str, env: dict[str, str]) -> None:
    node = running(start, env)
    os.kill(node.worker(role), signal.SIGSTOP)
    time.sleep(0.5)  # until the run waits for it, in whatever phase, an update between BEGIN and COMMIT included
    node.process.send_signal(signal.SIGINT)
    done = node.wait(10)
    assert (done.code, "Traceback" in done.stderr) == (130, False), done.stderr
    assert gone(node.run_dir, 1.0)


@pytest.mark.timeout(100)
def test_a_second_coordinator_on_the_same_run_directory_is_refused(start: Start) -> None:
    node = start("--serve")
    node.until((node.run_dir / "http.json").exists, "the API")
    second = start("--serve", run_dir=node.run_dir).wait(20)
    assert second.code == 2
    assert f"pid {node.process.pid}" in second.stderr
    node.process.terminate()
    assert node.wait(15).code == 0
