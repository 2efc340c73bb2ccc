"""A rank's share, as a shape and as a table."""

from __future__ import annotations

from math import prod

from hypothesis import assume, given, settings

from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import plan
from rollplex.layout.parallel.rank import rank_shape, rank_table, unsplit
from rollplex.layout.parameters import ITEM_BYTES, parameter_table
from rollplex.layout.shape import ModelShape
from rollplex.memory.predict import prefix_activation_bytes
from support.layouts import rollouts, shapes, trainings
from support.slices import small_shape


@given(shape=shapes(), training=trainings, rollout=rollouts)
@settings(max_examples=40, deadline=None)
def test_a_rank_has_as_many_bytes_as_the_plan_of_its_layout_gives_it(
    shape: ModelShape, training: TrainingLayout, rollout: RolloutLayout
) -> None:
    table = parameter_table(shape, dtype="float32", freeze_vision=False)
    for device in plan(table, shape, training, rollout).devices:
        trained = rank_table(table, shape, training, device.ranks.training)
        assert sum(entry.size_bytes for entry in trained.entries) == sum(p.size_bytes for p in device.training)
        sampled = rank_table(table, shape, rollout, device.ranks.rollout)
        assert [entry.size_bytes for entry in sampled.entries] == [p.size_bytes for p in device.rollout]
        assert [entry.shape for entry in sampled.entries] == [p.shape for p in device.rollout]


@given(shape=shapes())
@settings(max_examples=20, deadline=None)
def test_one_rank_has_the_model(shape: ModelShape) -> None:
    table = parameter_table(shape, dtype="bfloat16", freeze_vision=True)
    assert rank_table(table, shape, TrainingLayout(degree=1)) == table
    assert rank_shape(shape, TrainingLayout(degree=1)) == shape


@given(shape=shapes())
@settings(max_examples=20, deadline=None)
def test_all_ranks_together_have_the_model_once_and_what_is_not_split_on_each(shape: ModelShape) -> None:
    assume(shape.kv_heads >= 4)  # else rollout ranks share heads
    layout = RolloutLayout(degree=4)
    table = parameter_table(shape, dtype="float32", freeze_vision=False)
    ranks = [rank_table(table, shape, layout, rank) for rank in range(4)]
    held = sum(prod(entry.shape) for rank in ranks for entry in rank.entries) * ITEM_BYTES["float32"]
    whole = sum(entry.size_bytes for entry in unsplit(table, shape))
    assert held == sum(entry.size_bytes for entry in table.entries) + 3 * whole


def test_a_rank_computes_with_its_heads_and_columns() -> None:
    shape = rank_shape(small_shape(), TrainingLayout(degree=2))
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate) == (4, 1, 4, 8)
    assert shape.vocab == 64  # 70 padded to 128
    assert (shape.vision.heads, shape.vision.intermediate) == (4, 24)  # 45 padded to 48
    assert (shape.vision.head_dim, shape.vision.attention_width) == (4, 16)
    assert shape.hidden == 6
    assert rank_shape(small_shape(), TrainingLayout(degree=8)).kv_heads == 1
    rollout = rank_shape(small_shape(), RolloutLayout(degree=2, vision_sharded=False))
    assert (rollout.vocab, rollout.vision) == (70, small_shape().vision)


def test_what_a_rank_keeps_of_a_prefix_is_as_counted_by_hand() -> None:
    shape = rank_shape(small_shape(), TrainingLayout(degree=2))
    layer = 2 * (4 * 6 + 4 + 8 * 6) + 4 * 4 * 2 * (4 + 1) + 4 * 4 * 8 + 4 * 4  # norms, attention, MLP, log-sum-exp
    token = layer + (4 * 6 + 4 + 8 * 6) - 4 * 6 + 2 * 4 * 4 + 8
    text = 10 * token + 4 * 6 + 16
    assert (layer, text) == (456, 5520)
    found = prefix_activation_bytes(shape, rows=1, tokens=10, grids=[], freeze_vision=False, dtype="float32")
    assert found == text
    block = 2 * (4 * 32 + 4 + 8 * 32) + 4 * 4 * 16 + 4 * 4 + 4 * 4 * 24
    patch = block + (4 * 32 + 4 + 8 * 32) + 2 * 4 * 16 + 4 * 24 + 2 * 4 * 4
    tower = 16 * patch + 2 * 8 * 4 + 4 * 8 + 4 * 4 * 6  # 16 patches, 4 features
    grids = [(1, 4, 4)]
    found = prefix_activation_bytes(shape, rows=1, tokens=10, grids=grids, freeze_vision=False, dtype="float32")
    assert found == text + tower == 38_928
