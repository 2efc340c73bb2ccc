"""The blocks of four placements."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.journal.phases import Phase
from rollplex.layout.optimizer import optimizer_table
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.rank import rank_shape, rank_table
from rollplex.layout.parallel.tally import tally_model
from rollplex.layout.parallel.training import rank_training_table
from rollplex.layout.parameters import ParameterTable, gradient_table, parameter_table
from rollplex.layout.shape import read_shape
from rollplex.memory.placement import taken_bytes
from rollplex.memory.predict import logits_bytes, prefix_activation_bytes, rollout_kv_bytes
from rollplex.protocol.common import Device, Kind, Memory, Role
from rollplex_coordinator.decisions.peaks import plan_peak
from rollplex_coordinator.memory.budget import planned_blocks
from rollplex_coordinator.memory.names import OWN_WEIGHTS
from rollplex_coordinator.memory.sizes import Sizes
from rollplex_coordinator.planning.placements import NAMES, Placement, disaggregated_sides, place
from rollplex_coordinator.planning.question import Question, share_of
from support.core import make_config
from support.slices import small_shape

OVERHEAD = {"memory": {"overhead": 1000}}
SHAPE = small_shape(kv_heads=8)


def ask(config: Config, **changes: Any) -> Question:
    """8 heads on two devices, training TP 2 and rollout TP 1."""
    given: dict[str, Any] = {"gpus": 2, "training": 2, "rollout": 1, "rollout_gpus": 1, "hbm_bytes": 2**30}
    given |= {"shape": SHAPE, "model": "small", "prompt_tokens": 7, "image_tokens": 0}
    return Question(config=config, **{**given, **changes}).checked()


def apart(table: ParameterTable) -> ParameterTable:
    """Of a training rank of two, fused parameters in parts."""
    return rank_training_table(table, SHAPE, TrainingLayout(degree=2))


def held(placement: Placement, phase: Phase, index: int = 0) -> Counter[str]:
    """Bytes in one phase, by kind, of what stands."""
    found = Counter[str]()
    for block in placement.blocks:
        if block.device.index == index and phase in block.phases and not block.unit:
            found[block.kind] += block.size_bytes
    return found


@pytest.mark.parametrize(
    "sections", [{}, {"run": {"schedule": "stream"}}, {"memory": {"prefix_activations": "recompute"}}]
)
def test_on_one_device_ours_is_what_the_ledger_plans(model_folder: Path, sections: dict[str, Any]) -> None:
    config = make_config(model_folder, **sections)
    shape = read_shape(model_folder)
    question = ask(config, shape=shape, gpus=1, training=1, rollout_gpus=0, image_tokens=4)
    blocks = place("rollplex", question).blocks
    assert list(blocks[:-1]) == planned_blocks(config, Sizes(config), question.data, Device())
    assert (blocks[-1].kind, blocks[-1].size_bytes) == (Kind.OVERHEAD, 0)


def test_ours_stores_the_wider_shard_and_splits_the_rest_by_training(tmp_path: Path) -> None:
    config = make_config(tmp_path, **OVERHEAD)
    found = held(place("rollplex", ask(config)), Phase.UPDATE)
    training = TrainingLayout(degree=2)
    table = parameter_table(SHAPE, dtype="float32", freeze_vision=False)
    shard = rank_table(table, SHAPE, training)
    stored = tally_model(SHAPE, training, RolloutLayout(degree=1), dtype="float32").stored
    assert stored == table.total_bytes  # rollout's shard is the whole model
    assert found == {
        Kind.ACTOR_WEIGHTS: stored,
        Kind.REFERENCE_WEIGHTS: shard.total_bytes - shard.header_bytes,
        Kind.GRADIENTS: 2 * gradient_table(shard).total_bytes,
        Kind.OPTIMIZER_STATE: optimizer_table(apart(table), name="adamw", momentum=0.0).total_bytes,
        Kind.INPUTS: 2 * 4 * (7 * 32 + 128),  # 4 prompts of 7 tokens, two steps
        Kind.OVERHEAD: 1000,
    }


def test_naive_colocation_is_the_sum_of_everything(tmp_path: Path) -> None:
    config = make_config(tmp_path, **OVERHEAD)
    question = ask(config, micro_batch=3)
    placement = place("naive", question)
    shape = rank_shape(SHAPE, TrainingLayout(degree=2))
    table = parameter_table(SHAPE, dtype="float32", freeze_vision=False)
    shard = rank_table(table, SHAPE, TrainingLayout(degree=2))
    graph = prefix_activation_bytes(shape, rows=3, tokens=7 + 6, grids=[], freeze_vision=False, dtype="float32")
    graph += 3 * 6 * 4 * SHAPE.hidden
    expected = {
        Kind.ACTOR_WEIGHTS: shard.total_bytes + table.total_bytes,
        Kind.REFERENCE_WEIGHTS: shard.total_bytes,
        Kind.GRADIENTS: gradient_table(shard).total_bytes,
        Kind.OPTIMIZER_STATE: optimizer_table(apart(table), name="adamw", momentum=0.0).total_bytes,
        # two engines share 4 prompts; 3 responses each, whose last token is never fed
        Kind.ROLLOUT_KV: rollout_kv_bytes(SHAPE, rows=2, tokens=7, samples=3, max_new_tokens=6, dtype="float32"),
        Kind.WORKSPACE: graph + logits_bytes(shape, rows=3 + 18 - 3, dtype="float32"),
        Kind.OVERHEAD: 1000,
    }
    for phase in (Phase.LOAD, Phase.ROLLOUT, Phase.TRAIN):
        assert held(placement, phase) == expected
    assert plan_peak(placement.blocks)[0].minimum_bytes == sum(expected.values())


def test_serial_colocation_gives_back_what_a_phase_does_not_need(tmp_path: Path) -> None:
    config = make_config(tmp_path, **OVERHEAD)
    naive, serial = place("naive", ask(config)), place("serial", ask(config))
    everything = held(naive, Phase.TRAIN)
    rollout, train, update = (held(serial, phase) for phase in (Phase.ROLLOUT, Phase.TRAIN, Phase.UPDATE))
    assert rollout == {k: n for k, n in everything.items() if k not in (Kind.WORKSPACE, Kind.GRADIENTS)}
    assert Kind.ROLLOUT_KV not in train
    assert train[Kind.WORKSPACE] == everything[Kind.WORKSPACE]
    assert train[Kind.ACTOR_WEIGHTS] == everything[Kind.REFERENCE_WEIGHTS]
    assert update[Kind.WORKSPACE] == 0 < update[Kind.GRADIENTS]


def test_gradients_of_baselines_may_be_of_another_dtype(tmp_path: Path) -> None:
    config = make_config(tmp_path, model={"dtype": "bfloat16"})
    half, full = (
        held(place("naive", ask(config, baseline_gradients=dtype)), Phase.TRAIN)[Kind.GRADIENTS]
        for dtype in ("", "float32")
    )
    shard = rank_table(parameter_table(SHAPE, dtype="bfloat16", freeze_vision=False), SHAPE, TrainingLayout(degree=2))
    assert half == gradient_table(shard).total_bytes
    assert full == gradient_table(shard, dtype="float32").total_bytes > half


def test_disaggregation_has_nothing_of_rollout_where_it_trains(tmp_path: Path) -> None:
    config = make_config(tmp_path, **OVERHEAD)
    question = ask(config, gpus=4, training=4, rollout=2, rollout_gpus=2)
    trained, sampled = disaggregated_sides(question)
    assert (trained.gpus, trained.training, sampled.gpus, sampled.rollout) == (2, 2, 2, 2)
    placement = place("disaggregated", question)
    owners = {(block.device.index, block.owner) for block in placement.blocks}
    assert (0, str(Role.ROLLOUT)) not in owners
    assert {owner for index, owner in owners if index == 2} == {"rollout", "processes"}
    assert placement.sorts == {0: ("training, TP 2", (0, 1)), 2: ("rollout, TP 2", (2, 3))}
    table = parameter_table(SHAPE, dtype="float32", freeze_vision=False)
    assert held(placement, Phase.ROLLOUT, 2)[Kind.ACTOR_WEIGHTS] == (
        rank_table(table, SHAPE, RolloutLayout(degree=2)).total_bytes
    )
    assert held(placement, Phase.TRAIN, 2) == held(placement, Phase.ROLLOUT, 2)
    assert held(placement, Phase.ROLLOUT)[Kind.ACTOR_WEIGHTS] == (
        rank_table(table, SHAPE, TrainingLayout(degree=2)).total_bytes
    )


def test_optimizer_state_on_the_host_is_that_of_all_training_ranks(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    on_device = held(place("rollplex", ask(config)), Phase.UPDATE)
    placement = place("rollplex", ask(config, optimizer_on_host=True))
    assert Kind.OPTIMIZER_STATE not in held(placement, Phase.UPDATE)
    host = held(placement, Phase.UPDATE, index=1024)
    assert host[Kind.OPTIMIZER_STATE] == 2 * on_device[Kind.OPTIMIZER_STATE]
    assert "memory.optimizer: host" in placement.assumptions[-1]


def test_what_no_run_does_yet_is_said(tmp_path: Path) -> None:
    gpu = {"model": {"dtype": "bfloat16"}, "device": {"kind": "cuda"}}
    config = make_config(tmp_path, **gpu)
    said = "\n".join(place("rollplex", ask(config, shape=small_shape(kv_heads=1))).assumptions)
    assert "2 training ranks share 1 K/V heads" in said
    alone = place("rollplex", ask(config, gpus=1, training=1, rollout_gpus=0)).assumptions
    assert not any("yet" in assumption for assumption in alone)


def test_an_engine_that_copies_weights_copies_its_own_shard(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        model={"dtype": "bfloat16"},
        device={"kind": "cuda"},
        rollout={"engine": "sglang", "sglang": {"own_weights": True}},
    )
    question = ask(config, shape=small_shape(kv_heads=8, vocab=2_000_000))
    found = {block.purpose: block.size_bytes for block in place("rollplex", question).blocks}
    whole = parameter_table(question.shape, dtype="bfloat16", freeze_vision=False).total_bytes
    assert found[OWN_WEIGHTS] == taken_bytes(whole, Memory.CUDA)


def test_replicas_share_the_prompts_and_their_batches_shrink(tmp_path: Path) -> None:
    batching = {"decode_prompts": 5, "prefix_prompts": 4, "suffix_prompts": 2}
    config = make_config(tmp_path, data={"prompts_per_iteration": 5}, batching=batching)
    shared = share_of(config, 2)
    assert (shared.data.prompts_per_iteration, shared.decode_prompts, shared.prefix_prompts) == (3, 3, 3)
    assert shared.suffix_prompts == 2
    assert share_of(config, 1) == config


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"image_tokens": 8}, "no more image tokens"),
        ({"rollout_gpus": 2}, "both sides"),
        ({"gpus": 3}, "do not hold"),
        ({"training": 16, "gpus": 16}, "8 attention heads / 16 = 0.5"),
        ({"baseline_gradients": "int8"}, "cannot have this dtype"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ask(make_config(tmp_path), **changes)


@pytest.mark.parametrize("name", NAMES)
def test_the_overhead_is_that_of_one_device_also_of_a_configuration_for_several(tmp_path: Path, name: str) -> None:
    gpu = {"model": {"dtype": "bfloat16"}, "device": {"kind": "cuda"}, "memory": {"overhead": None}}
    one, two = (make_config(tmp_path, **gpu, parallel={"devices": devices}) for devices in (1, 2))
    assert two.overhead_bytes == 2 * one.overhead_bytes
    found = [held(place(name, ask(config)), Phase.TRAIN)[Kind.OVERHEAD] for config in (one, two)]
    assert found == [one.overhead_bytes] * 2
