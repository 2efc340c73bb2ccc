"""Rollout parameters with their parts apart."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings

from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.parts import rollout_parts
from rollplex.layout.parallel.plan import plan
from rollplex.layout.parameters import parameter_table
from rollplex.layout.shape import ModelShape
from support.layouts import carried_out, rollouts, shapes, trainings
from support.slices import full_model, sampled


@given(shape=shapes(), training=trainings, rollout=rollouts)
@settings(max_examples=40, deadline=None)
def test_parts_put_together_are_what_the_rank_samples_from(
    shape: ModelShape, training: TrainingLayout, rollout: RolloutLayout
) -> None:
    table = parameter_table(shape, dtype="float32", freeze_vision=True)
    group = plan(table, shape, training, rollout)
    segments, model = carried_out(group, shape, "float32"), full_model(shape, "float32")
    for device in group.devices:
        expected = sampled(model, shape, rollout, device.ranks.rollout)
        parts = iter(rollout_parts(device))
        for parameter in device.rollout:
            own = [next(parts) for _ in parameter.stored.split.parts]
            assert [part.name for part in own] == [part.name for part in parameter.stored.split.parts]
            assert {(part.trained, part.stored.offset) for part in own} == {
                (parameter.trained, parameter.stored.offset)
            }
            axis = 1 if parameter.stored.split.axis == "columns" else 0
            views = []
            for part in own:
                assert part.view is not None
                assert part.shape == part.view.shape
                views.append(segments.at(part.view))
            assert np.array_equal(np.concatenate(views, axis), expected[parameter.name]), parameter.name
        assert not list(parts)


@given(shape=shapes())
@settings(max_examples=20, deadline=None)
def test_with_equal_degrees_they_are_the_training_parameters(shape: ModelShape) -> None:
    assume(shape.kv_heads >= 2)  # else rollout ranks share heads
    table = parameter_table(shape, dtype="bfloat16", freeze_vision=False)
    for device in plan(table, shape, TrainingLayout(degree=2), RolloutLayout(degree=2)).devices:
        assert rollout_parts(device) == device.training
