"""Ranges of ranks, and which device has which ranks."""

from __future__ import annotations

from itertools import product

import pytest

from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout, group
from rollplex.layout.parallel.split import Split, splits
from rollplex.layout.parameters import parameter_table
from rollplex.layout.published import QWEN2_5_VL
from support.slices import DEGREES

SHAPE = QWEN2_5_VL["3B"]
SPLITS = {s.entry.name: s for s in splits(parameter_table(SHAPE, dtype="bfloat16", freeze_vision=False), SHAPE)}
QKV: Split = SPLITS["model.layers.0.self_attn.qkv_proj.weight"]


@pytest.mark.parametrize(("training", "rollout"), list(product(DEGREES, DEGREES)))
def test_every_rank_of_every_trainer_and_engine_is_on_one_device(training: int, rollout: int) -> None:
    members = group(TrainingLayout(degree=training), RolloutLayout(degree=rollout))
    size = max(training, rollout)
    assert [m.device for m in members] == list(range(size))
    assert {(m.replica, m.training) for m in members} == set(product(range(size // training), range(training)))
    assert {(m.engine, m.rollout) for m in members} == set(product(range(size // rollout), range(rollout)))


def test_a_device_s_coarse_shard_contains_its_fine_one() -> None:
    members = group(TrainingLayout(degree=4), RolloutLayout(degree=2))
    assert [(m.training, m.rollout, m.engine) for m in members] == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    members = group(TrainingLayout(degree=1), RolloutLayout(degree=2))
    assert [(m.training, m.replica, m.rollout) for m in members] == [(0, 0, 0), (0, 1, 1)]


def test_rollout_ranks_share_whole_heads_and_training_ranks_divide_them() -> None:
    _, k, _ = QKV.parts
    assert [RolloutLayout(degree=8).shard(QKV, k, rank) for rank in range(8)] == [(0, 128)] * 4 + [(128, 256)] * 4
    assert [TrainingLayout(degree=8).shard(QKV, k, rank) for rank in (0, 4, 7)] == [(0, 32), (128, 160), (224, 256)]


def test_a_tower_that_is_not_split_is_whole_on_every_rank() -> None:
    split = SPLITS["visual.blocks.0.attn.proj.weight"]
    for layout in (TrainingLayout(degree=4, vision_sharded=False), RolloutLayout(degree=4, vision_sharded=False)):
        assert layout.shard(split, split.parts[0], 3) == (0, 1280)
        assert layout.shard(QKV, QKV.parts[0], 3) == (1536, 2048), "the text model is split all the same"


def test_without_its_padding_a_part_is_cut_as_torch_chunk_cuts() -> None:
    split = SPLITS["visual.blocks.0.mlp.down_proj.weight"]
    layout = TrainingLayout(degree=8, padding_sharded=False)
    assert [layout.shard(split, split.parts[0], rank) for rank in (0, 7)] == [(0, 428), (2996, 3420)]
