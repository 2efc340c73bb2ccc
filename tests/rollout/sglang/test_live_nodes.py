"""Whole nodes whose rollout is the real SGLang, on the CPU: on one device, and on two in each placement.

Layouts are written as training TP x replicas / rollout TP x engines; + stands for devices of their own. Weights move
far with each update, so that a rollout that missed one would give log-probabilities far from the trainer's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rollplex.bench.gap import read_gaps
from rollplex.bench.lengths import parse_lengths
from rollplex.bench.placement import parse_placements
from rollplex.bench.refresh_plan import device_copies
from rollplex.bench.workload import Wanted, write_workload
from rollplex.config import load
from rollplex.layout.parameters import parameter_table
from rollplex.layout.shape import read_shape
from support.live_sglang import KERNELS, unavailable
from support.nodes import Finished, Node, end_all
from support.warm import COLD

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "-"),
    pytest.mark.timeout(1200),
]
SITE = Path(__file__).parents[2] / "support" / "host_sglang"
ITERATIONS, NODE_S = 3, 1000.0
MOVES = "0.003"
"""Learning rate: a step of Adam moves each weight by about so much, a sixth of what weights are."""
NOISE = 0.08
"""Mean gap of a row in bfloat16, as seen: 0.035. Where updates were not copied: 1.3."""
BINDS = {"2x1/2x1": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
"""SGLang wants a core for each rank."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wanted = Wanted(
        lengths=parse_lengths("6:24"), group_size=4, prompts=4, prompt_tokens=96, mixed=True, preset="tiny-gpu"
    )
    return write_workload(tmp_path_factory.mktemp("w"), wanted).config


def finished(config: Path, layout: str, run_dir: Path) -> Finished:
    (placement,) = parse_placements(layout)
    settings = [
        *placement.overrides,
        "rollout.engine=sglang",
        "model.dtype=bfloat16",
        f"optimizer.lr={MOVES}",
        "run.log_tokens=true",
        "run.log_completions=100",
        "checkpoint.at_end=false",
    ]
    command = [sys.executable, "-m", "rollplex_coordinator", "--config", str(config), "--run-dir", str(run_dir)]
    command += ["--iterations", str(ITERATIONS), *(word for text in settings for word in ("--set", text))]
    path = os.pathsep.join([str(SITE), str(KERNELS), *(path for path in sys.path if path)])
    node = Node(command, run_dir, {**COLD, **BINDS.get(layout, {}), "PYTHONPATH": path})
    try:
        return node.wait(NODE_S)
    finally:
        end_all([node])


@pytest.mark.parametrize("layout", ["1x1/1x1", "2x1/1x2", "2x1/2x1", "1x1+1x1"])
def test_every_iteration_samples_from_the_weights_that_the_trainer_scores_with(
    config: Path, layout: str, tmp_path: Path
) -> None:
    ended = finished(config, layout, tmp_path / "r")
    assert ended.code == 0, ended.stderr
    assert [row["updated"] for row in ended.metrics] == [1.0] * ITERATIONS
    gaps = read_gaps(ended.run_dir)
    assert len(gaps.steps) == ITERATIONS
    assert 0.0 < gaps.worst < NOISE

    model, (placement,) = load(config, []).model, parse_placements(layout)
    shape = read_shape(model.path)
    table = parameter_table(shape, dtype="bfloat16", freeze_vision=model.freeze_vision)
    planned = sum(each.copied_bytes for each in device_copies(placement, table, shape))
    for row in ended.metrics:
        assert row.get("refreshed_bytes", 0.0) + row.get("rebuilt_bytes", 0.0) == planned
