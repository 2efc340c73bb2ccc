"""Workers that die or hang in the middle of a run: all start again, and every number is as if nothing had happened."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from rollplex.journal.events import (
    ErrorRaised,
    EvalDone,
    IterationDone,
    RunStarted,
    ServiceDied,
    ServiceStarted,
    UpdateBegin,
    UpdateCommitted,
    WorkersRestarted,
    WorkersRestarting,
)
from rollplex.protocol.common import Role
from support.killing import HOLDERS, ROLES, Driver
from support.nodes import Finished, Project, Start, run_processes

ITERATIONS = 12
ACK_S = 5.0
SETTINGS: dict[str, object] = {
    "run.schedule": "serial",
    "run.iterations": 20,
    "run.restarts": 50,
    "run.log_tokens": True,
    "run.log_completions": 100,
    "run.sample_every": 3,
    "rollout.max_new_tokens": 12,
    "rollout.forced_lengths": [3, 4, 2, 6, 5, 9, 12, 7, 10, 8, 11, 3],
    "optimizer.warmup_steps": 2,
    "checkpoint.at_end": True,
    "deadlines.ack_s": ACK_S,
}


@dataclass
class Disturbed:
    """A run in which workers were killed, one after the other."""

    run: Finished
    expected: list[tuple[str, str]]
    """Whose end, in which phase."""
    leases: list[list[Any]]
    """While it was idle: before the first end, and after each."""


def settings(project: Project) -> dict[str, object]:
    held_out = str(project.folder / "data" / "held_out.jsonl")
    return {**SETTINGS, "eval": [{"name": "held_out", "data": held_out, "every": 4, "limit": 6}]}


@pytest.fixture(scope="module")
def runs(start: Start, project: Project) -> tuple[Disturbed, Finished]:
    """One run with an end of each kind, and then one with none: a busy machine must not look like one that hangs."""
    node = start("--serve", overrides=settings(project))
    with node.api() as api:
        driver = Driver(node, api)
        driver.idle()
        driver.kill_in("EVAL", "prefix")
        for phase in HOLDERS:
            for victim in ROLES:
                driver.kill_in(phase, victim)
        driver.kill_while_readers_drain()
        for victim in ROLES:
            driver.kill_when_idle(victim)
        driver.kill_in_a_checkpoint()
        driver.hang("rollout")
        assert driver.status()["iterations_done"] == ITERATIONS
        api.post("/stop", json={"when": "after_iteration", "exit": True}).raise_for_status()
        disturbed = Disturbed(node.wait(), driver.expected, driver.leases)
    assert disturbed.run.code == 0, disturbed.run.stderr
    undisturbed = start("--iterations", str(ITERATIONS), overrides=settings(project)).wait()
    assert undisturbed.code == 0, undisturbed.stderr
    return disturbed, undisturbed


def timeless(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


pytestmark = pytest.mark.timeout(200)  # whichever test comes first starts the nodes


def test_each_end_of_a_worker_is_named_and_followed_by_a_restart(runs: tuple[Disturbed, Finished]) -> None:
    disturbed, _ = runs
    begun = disturbed.run.of(WorkersRestarting)
    assert [(event.role, event.phase) for event in begun] == disturbed.expected
    assert [event.number for event in disturbed.run.of(WorkersRestarted)] == list(range(1, len(begun) + 1))
    *killed, hung = begun
    assert {event.error.got for event in killed} == {"killed by SIGKILL"}
    assert "no acknowledgement" in hung.error.got
    assert len(disturbed.run.of(ServiceDied)) == len(killed)
    assert disturbed.run.of(ErrorRaised) == []
    assert len(disturbed.run.of(RunStarted)) == 1
    for role in ROLES:
        incarnations = [event.incarnation for event in disturbed.run.of(ServiceStarted) if event.role == role]
        assert incarnations == list(range(1, len(begun) + 2))
    assert {event.incarnation for event in disturbed.run.of(ServiceStarted) if event.role == "reward"} == {1}


def test_the_weights_of_every_version_have_the_digest_that_they_have_without_faults(
    runs: tuple[Disturbed, Finished],
) -> None:
    disturbed, other = runs
    committed = [(event.step, event.version, event.digest) for event in disturbed.run.of(UpdateCommitted)]
    assert committed == [(event.step, event.version, event.digest) for event in other.of(UpdateCommitted)]
    assert [version for _, version, _ in committed] == list(range(1, len(committed) + 1))
    assert len(disturbed.run.of(UpdateBegin)) == len(committed)
    known = {version: digest for _, version, digest in committed}
    assert all(event.digest == known.get(event.version, event.digest) for event in disturbed.run.of(WorkersRestarted))
    assert disturbed.run.checkpoint() == other.checkpoint()


def test_records_have_each_iteration_and_evaluation_once_and_as_without_faults(
    runs: tuple[Disturbed, Finished],
) -> None:
    disturbed, other = runs
    assert timeless(disturbed.run.metrics) == timeless(other.metrics)
    assert timeless(disturbed.run.evals) == timeless(other.evals)
    assert len(disturbed.run.of(IterationDone)) == len(other.metrics)
    assert len(disturbed.run.of(EvalDone)) == len(other.of(EvalDone))
    for name in ("completions.jsonl", "samples/step_0.json", "samples/step_9.json"):
        assert (disturbed.run.run_dir / name).read_bytes() == (other.run_dir / name).read_bytes(), name


def test_after_each_restart_only_what_stands_is_leased(runs: tuple[Disturbed, Finished]) -> None:
    disturbed, _ = runs
    first, *later = disturbed.leases
    assert len(first) == 5
    assert all(leases == first for leases in later)


def broken(rule: str, role: str) -> dict[str, object]:
    return {f"services.{role}": [sys.executable, "-m", "warm_broken", rule, role]}


def test_a_service_that_dies_at_every_start_ends_the_run_with_the_first_error_first(start: Start) -> None:
    overrides = {"run.restarts": 2, **broken("starts_only_once", "prefix")}
    node = start("--serve", overrides=overrides)
    with node.api() as api:
        node.until(lambda: api.get("/status").json()["phase"] == "IDLE", "idleness")
    os.kill(node.worker("rollout"), signal.SIGKILL)
    done = node.wait(30)
    assert done.code == 1
    _, _, text = done.stderr.partition("error: ")
    first, *more = text.splitlines()
    assert "the rollout service died; got killed by SIGKILL" in first
    assert "in phase IDLE" in first
    expected = ["log:", "restart 1 of 2 failed", "restart 2 of 2 failed", "run.restarts is 2, and so many were made"]
    assert all(line.strip().startswith(words) for line, words in zip(more, expected, strict=True)), more
    assert "the prefix service died; got exit code 7" in more[1]
    assert [event.role for event in done.of(WorkersRestarting)] == [Role.ROLLOUT, Role.PREFIX]
    assert done.of(WorkersRestarted) == []
    (raised,) = done.of(ErrorRaised)
    assert (raised.phase, raised.service) == ("IDLE", "rollout[0:0]")
    assert run_processes(node.run_dir) == []


def test_a_trainer_that_dies_between_begin_and_commit_ends_the_run_and_its_weights_are_never_served(
    start: Start,
) -> None:
    done = start("--iterations", "3", overrides=broken("dies_in_its_second_update", "trainer")).wait()
    assert done.code == 1
    assert "the trainer service died" in done.stderr
    assert "in phase UPDATE" in done.stderr
    assert [event.version for event in done.of(UpdateBegin)] == [0, 1]
    assert [event.version for event in done.of(UpdateCommitted)] == [1]
    assert done.of(WorkersRestarting) == []
    assert len(done.metrics) == 1
    assert not list((done.run_dir / "checkpoints").glob("step_*"))
