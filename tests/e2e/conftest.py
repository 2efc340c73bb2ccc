"""Nodes for end-to-end tests: real processes on host memory, on real scans, started once and shared where possible."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollplex.config.yaml_text import dumps
from rollplex.demo.digits import write_digits
from rollplex.demo.recipe import make_config
from rollplex.presets import TINY, write_preset
from support.nodes import Node, Project, Start, end_all

SUPPORT = Path(__file__).parents[1] / "support"

# Long-tailed lengths: the first group of each decode unit is short, the last one long.
SMALL = {
    "data.prompts_per_iteration": 4,
    "rollout.group_size": 3,
    "rollout.max_new_tokens": 48,
    "rollout.temperature": 0.7,
    "rollout.forced_lengths": [3, 4, 2, 6, 5, 9, 12, 7, 20, 30, 48, 25],
    "batching.decode_prompts": 4,
    "batching.prefix_prompts": 1,
    "batching.suffix_prompts": 1,
    "algorithm.beta": 0.05,
    "rewards.functions": [{"function": f"{SUPPORT / 'token_rewards.py'}:by_bytes"}],
    "checkpoint.every": 0,
    "deadlines.leave_s": 3.0,
    "memory.overhead": 0,
}


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Two digits and the tiny model."""
    folder = tmp_path_factory.mktemp("e2e")
    write_digits(folder / "data", digits=(0, 1))
    write_preset(TINY.name, folder / "model")
    config = make_config(quick=True)
    config["eval"] = []
    path = folder / "config.yaml"
    path.write_text(dumps(config), encoding="utf-8")
    return Project(folder, path)


@pytest.fixture(scope="session")
def start(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts nodes; whatever is left of them at the end of the session is killed."""
    nodes: list[Node] = []

    def begin(
        *arguments: str,
        overrides: dict[str, object] | None = None,
        run_dir: Path | None = None,
        env: dict[str, str] | None = None,
        config: Path | None = None,
    ) -> Node:
        run_dir = run_dir or tmp_path_factory.mktemp("run") / "r"
        command = [sys.executable, "-m", "rollplex_coordinator", "--config", str(config or project.config)]
        command += ["--run-dir", str(run_dir), *arguments]
        for key, value in {**SMALL, **(overrides or {})}.items():
            command += ["--set", f"{key}={json.dumps(value)}"]
        nodes.append(Node(command, run_dir, env))
        return nodes[-1]

    yield begin
    end_all(nodes)
