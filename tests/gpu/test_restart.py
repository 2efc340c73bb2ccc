"""Workers that are killed on a real GPU, under MPS: all start again over the segments that the coordinator holds."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollplex.journal.events import UpdateCommitted, WorkersRestarted, WorkersRestarting
from rollplex.nvml import Gpu, open_gpu
from support.gpu_processes import processes_on
from support.killing import HOLDERS, Driver
from support.nodes import Finished, Node, end_all
from support.warm import COLD

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

NODE_S = 300.0
RETAINED = 256 * 2**20
"""What the pools of the same processes may differ by from one iteration to another."""
ENGINES = ["transformers", "sglang"]
SETTINGS = ("run.schedule=serial", "run.restarts=20", "run.deterministic=true", "checkpoint.at_end=true")


@dataclass
class Killed:
    """A run in which workers were killed."""

    run: Finished
    expected: list[tuple[str, str]]
    used_bytes: list[int]
    """HBM while it was idle after an iteration: before the first end, and after each."""
    there: list[list[str]]
    """Every process on the GPU then, by what it is."""


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    found = open_gpu(0)
    yield found
    found.close()


@pytest.fixture(scope="module", params=ENGINES)
def runs(
    request: pytest.FixtureRequest, config: Path, gpu: Gpu, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Killed, Finished | None]]:
    """For each engine a run in which workers are killed, and for one that gives the same bits again a run without."""
    engine: str = request.param
    if engine == "sglang" and importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    nodes: list[Node] = []

    def start(*arguments: str) -> Node:
        run_dir = tmp_path_factory.mktemp("r") / "r"
        command = [sys.executable, "-m", "rollplex_coordinator", "--config", str(config), "--run-dir", str(run_dir)]
        for text in (*SETTINGS, f"rollout.engine={engine}"):
            command += ["--set", text]
        nodes.append(Node([*command, *arguments], run_dir, COLD))
        return nodes[-1]

    victims = HOLDERS if engine == "transformers" else {"ROLLOUT": HOLDERS["ROLLOUT"]}
    killed = kill_in_each_phase(start("--serve"), victims, gpu)
    other = None
    if engine == "transformers":  # SGLang's bits depend on which requests happen to be decoded together
        other = start("--iterations", str(len(killed.run.metrics))).wait(NODE_S)
        assert other.code == 0, other.stderr
    yield killed, other
    end_all(nodes)


def kill_in_each_phase(node: Node, victims: dict[str, str], gpu: Gpu) -> Killed:
    used: list[int] = []
    there: list[list[str]] = []
    with node.api() as api:
        driver = Driver(node, api)

        def look() -> None:
            used.append(gpu.used_bytes())
            there.append(sorted(processes_on(gpu).values()))

        driver.idle()
        driver.begin()
        node.until_iterations(1)
        driver.idle()
        look()
        for phase, victim in victims.items():
            driver.kill_in(phase, victim)
            look()
        api.post("/stop", json={"when": "after_iteration", "exit": True}).raise_for_status()
        ended = node.wait(NODE_S)
    assert ended.code == 0, ended.stderr
    return Killed(run=ended, expected=driver.expected, used_bytes=used, there=there)


def test_each_end_is_followed_by_a_restart_over_the_weights_as_they_stood(
    runs: tuple[Killed, Finished | None],
) -> None:
    killed, _ = runs
    assert [(event.role, event.phase) for event in killed.run.of(WorkersRestarting)] == killed.expected
    committed = {event.version: event.digest for event in killed.run.of(UpdateCommitted)}
    assert len(set(committed.values())) == len(committed) == 1 + len(killed.expected)
    stood = [(event.version, event.digest) for event in killed.run.of(WorkersRestarted)]
    assert stood == [(version, committed[version]) for version in range(1, len(committed))]


def test_the_weights_of_each_version_are_those_of_a_run_without_ends(runs: tuple[Killed, Finished | None]) -> None:
    killed, other = runs
    if other is None:
        pytest.skip("this engine does not give the same bits again")
    committed = [(event.version, event.digest) for event in killed.run.of(UpdateCommitted)]
    assert committed == [(event.version, event.digest) for event in other.of(UpdateCommitted)]
    assert killed.run.checkpoint() == other.checkpoint()


def test_no_memory_and_no_process_stays_on_the_gpu(runs: tuple[Killed, Finished | None]) -> None:
    killed, _ = runs
    assert max(killed.used_bytes) - killed.used_bytes[0] < RETAINED, killed.used_bytes
    assert killed.there == [killed.there[0]] * len(killed.there)
