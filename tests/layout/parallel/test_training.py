"""What a training rank has beside the weights."""

from __future__ import annotations

from hypothesis import given, settings

from rollplex.layout.optimizer import optimizer_table
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import plan
from rollplex.layout.parallel.training import gradient_plan, rank_training_table, reference_plan
from rollplex.layout.parameters import gradient_table, parameter_table
from rollplex.layout.shape import ModelShape
from support.layouts import rollouts, shapes, trainings
from support.slices import small_shape


@given(shape=shapes(), training=trainings, rollout=rollouts)
@settings(max_examples=40, deadline=None)
def test_the_table_of_a_rank_has_the_parts_of_its_plan(
    shape: ModelShape, training: TrainingLayout, rollout: RolloutLayout
) -> None:
    table = parameter_table(shape, dtype="float32", freeze_vision=True)
    for device in plan(table, shape, training, rollout).devices:
        own = rank_training_table(table, shape, training, device.ranks.training)
        expected = [(p.name, p.shape, p.size_bytes, p.trained) for p in device.training]
        assert [(e.name, e.shape, e.size_bytes, e.trainable) for e in own.entries] == expected
        assert [e.decay for e in own.entries] == [p.stored.split.entry.decay for p in device.training]


def test_ranks_divide_the_states_of_what_is_split() -> None:
    shape = small_shape()
    table = parameter_table(shape, dtype="bfloat16", freeze_vision=False)
    rank = rank_training_table(table, shape, TrainingLayout(degree=2), 1)
    states = optimizer_table(rank, name="adamw", momentum=0.0)
    hf = "model.language_model.layers.0"
    assert states.get(f"{hf}.self_attn.k_proj.weight", "master").shape == (4, 6)
    assert states.get(f"{hf}.mlp.down_proj.weight", "exp_avg").shape == (6, 8)
    assert states.get("model.visual.blocks.0.attn.qkv.weight:v", "exp_avg_sq").shape == (16, 32)
    assert states.get(f"{hf}.input_layernorm.weight", "exp_avg").shape == (6,)


def test_gradients_and_reference_lie_without_gaps_and_only_where_something_is_trained() -> None:
    shape = small_shape()
    table = parameter_table(shape, dtype="float32", freeze_vision=True)
    one = gradient_plan(table, shape, TrainingLayout(degree=1)).devices[0]
    assert one.storage.total_bytes == gradient_table(table).total_bytes
    layout = TrainingLayout(degree=2)
    gradients, reference = (make(table, shape, layout) for make in (gradient_plan, reference_plan))
    assert gradients == reference
    assert [p.name for p in gradients.devices[0].training] == [
        p.name for p in plan(table, shape, layout, RolloutLayout(degree=1)).devices[0].training if p.trained
    ]
    wide = gradient_plan(table, shape, layout, dtype="float64")
    assert wide.devices[1].training[0].size_bytes == 2 * gradients.devices[1].training[0].size_bytes
