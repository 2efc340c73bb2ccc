"""Other configurations through the same processes: replicated prefixes, a frozen tower, other losses and dtypes."""

from __future__ import annotations

import pytest
from safetensors.numpy import load

from rollplex.journal.events import LeaseGranted, UnitDone, UnitKind
from rollplex.protocol.common import Kind
from support.nodes import Finished, Project, Start

SGD = {"optimizer.name": "sgd", "optimizer.lr": 1.0, "optimizer.warmup_steps": 0}
ITERATIONS = 2


@pytest.fixture(scope="module")
def shared(start: Start) -> Finished:
    return start("--iterations", str(ITERATIONS), overrides=SGD).wait()


@pytest.fixture(scope="module")
def replicated(start: Start) -> Finished:
    return start("--iterations", str(ITERATIONS), overrides={**SGD, "run.share_prefix": False}).wait()


@pytest.mark.timeout(200)
def test_the_updates_of_shared_and_replicated_prefixes_agree_to_rounding(
    project: Project, shared: Finished, replicated: Finished
) -> None:
    assert (shared.code, replicated.code) == (0, 0), replicated.stderr
    start = load((project.folder / "model" / "model.safetensors").read_bytes())
    (model,) = [name for name in shared.checkpoint() if "optimizer" not in name]
    ours, theirs = load(shared.checkpoint()[model]), load(replicated.checkpoint()[model])
    moves = {key: (ours[key] - value, theirs[key] - value) for key, value in start.items()}
    largest = max(abs(move).max() for move, _ in moves.values())
    for key, (one, other) in moves.items():
        assert abs(one).max() > 0.0, key
        assert abs(one - other).max() <= 1e-3 * max(abs(one).max(), 1e-3 * largest), key
    assert shared.checkpoint() != replicated.checkpoint(), "they are computed differently"


@pytest.mark.timeout(200)
def test_replicating_runs_the_vision_tower_once_per_response_and_sharing_once_per_prompt(
    shared: Finished, replicated: Finished
) -> None:
    def prompts(run: Finished, kind: UnitKind) -> int:
        return sum(unit.vision_prompts for unit in run.of(UnitDone) if unit.kind is kind)

    for kind in (UnitKind.REFERENCE_PREFIX, UnitKind.ACTOR_PREFIX):
        assert prompts(shared, kind) == ITERATIONS * 4
        assert prompts(replicated, kind) == ITERATIONS * 4 * 3
    assert prompts(replicated, UnitKind.GENERATE) == ITERATIONS * 4


@pytest.mark.timeout(200)
def test_a_frozen_tower_in_bfloat16_without_reference_streams_with_rloo(start: Start) -> None:
    overrides = {
        "model.freeze_vision": True,
        "model.dtype": "bfloat16",
        "algorithm.beta": 0.0,
        "algorithm.loss": "rloo",
        "run.schedule": "stream",
        "optimizer.weight_decay": 0.1,
    }
    run = start("--iterations", str(ITERATIONS), overrides=overrides).wait()
    assert run.code == 0, run.stderr
    kinds = {unit.kind for unit in run.of(UnitDone)}
    assert UnitKind.REFERENCE_PREFIX not in kinds
    assert UnitKind.SCORE not in kinds
    assert Kind.REFERENCE_WEIGHTS not in {lease.kind for lease in run.of(LeaseGranted)}
    assert [row["updated"] for row in run.metrics] == [1.0] * ITERATIONS
    files = run.checkpoint()
    moments = load(next(content for name, content in files.items() if "optimizer" in name))
    assert not any("visual" in name for name in moments)
    streamed = start("--iterations", str(ITERATIONS), overrides={**overrides, "memory.optimizer": "host"}).wait()
    assert streamed.code == 0, streamed.stderr
    assert streamed.checkpoint() == files, "state that passes through in pieces becomes the same, bit for bit"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "gspo"])
def test_other_losses_run(start: Start, loss: str) -> None:
    overrides = {"algorithm.loss": loss, "algorithm.scale_rewards": "batch", "algorithm.kl": "k2"}
    run = start("--iterations", "1", overrides=overrides).wait()
    assert run.code == 0, run.stderr
    assert run.metrics[0]["updated"] == 1.0
