"""Rows written by hand, a bench folder's identity, and a small workload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollplex.bench.facts import Facts
from rollplex.bench.folder import Made
from rollplex.bench.lengths import Lengths
from rollplex.bench.machine import Machine, Software
from rollplex.bench.rows import Row
from rollplex.bench.workload import Wanted, Workload, write_workload

MakeRow = Callable[..., Row]


@pytest.fixture(scope="session")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """Six vision tokens, eleven of text, two prompts of three responses of 3 to 9 tokens."""
    lengths = Lengths(shortest=3, longest=9)
    folder = tmp_path_factory.mktemp("workload")
    return write_workload(
        folder, Wanted(vision_tokens=6, text_tokens=11, lengths=lengths, group_size=3, prompts=2, preset="tiny")
    )


@pytest.fixture(autouse=True)
def _no_edits_of_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of rows refuses rows of other changes; a checkout that is edited during the tests is none of theirs."""
    software = Software(rollplex="0.1.0", python="3.11.7", packages={"torch": "2.13.0"}, commit="b" * 40)
    monkeypatch.setattr("rollplex.bench.schedules.read_software", lambda: software)


@pytest.fixture
def machine() -> Machine:
    return Machine(cpu="AMD EPYC", cores=2, memory_bytes=24 * 2**30, system="Debian 12, Linux 6.1")


@pytest.fixture
def made(machine: Machine) -> Made:
    """Of four iterations, one of them to warm up."""
    software = Software(
        rollplex="0.1.0", python="3.11.7", packages={"torch": "2.13.0", "transformers": "5.24.0"}, commit="a" * 40
    )
    config: dict[str, object] = {"run": {"seed": 0, "threads": 1}, "model": {"dtype": "float32"}}
    return Made(machine=machine, software=software, config=config, data="d", model="m", iterations=4, warmup=1)


@pytest.fixture
def facts() -> Facts:
    """P = 600, G = 8."""
    return Facts(
        prompts=2, group_size=8, prompt_tokens=600.0, vision_tokens=576.0, parameters=5_000_000, reference=True
    )


@pytest.fixture
def row() -> MakeRow:
    """row("serial", "shared", repeat, iteration=…, score=…): an iteration of 2 s unless told otherwise."""

    def make(schedule: str, prefix: str, repeat: int = 0, **given: Any) -> Row:
        seconds = {
            "iteration": 2.0,
            "rollout": 0.5,
            "score": 0.4,
            "train": 1.0,
            "update": 0.1,
            "other": 0.0,
            "prefix_forward": 0.6,
            "prefix_hidden": 0.0,
            "prefix_backward": 0.4,
            "score_units": 0.1,
            "suffix_units": 0.3,
            "generate": 0.5,
        }
        parts = {name: given.pop(name) for name in list(given) if name in seconds}
        values: dict[str, Any] = {
            "digest": f"{prefix} weights",
            "hidden_share": 0.0,
            "prompt_tokens": 600.0,
            "response_tokens": 32.0,
            "started": "2026-11-29T10:00:00Z",
            "wall_s": 12.0,
        }
        seconds |= parts
        return Row(
            repeat=repeat,
            schedule=schedule,
            prefix=prefix,
            iteration_s=(seconds["iteration"],) * 3,
            median_s=seconds,
            **{**values, **given},
        )

    return make
