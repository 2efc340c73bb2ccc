"""Shards put together are the whole tensors."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import plan
from rollplex.layout.parallel.slices import slice_of
from rollplex.layout.parameters import parameter_table
from rollplex.layout.shape import ModelShape
from support.layouts import Array, rollouts, shapes, trainings
from support.slices import full_model, small_shape, trained


def put(whole: Array, axis: int, taken: tuple[int, int], value: Array) -> None:
    where = slice(*taken)
    if axis:
        whole[:, where] = value
    else:
        whole[where] = value


@given(shape=shapes(), training=trainings, rollout=rollouts)
@settings(max_examples=40, deadline=None)
def test_shards_of_all_ranks_put_together_are_transformers_tensors_and_the_stored_ones(
    shape: ModelShape, training: TrainingLayout, rollout: RolloutLayout
) -> None:
    table = parameter_table(shape, dtype="float32", freeze_vision=False)
    model = full_model(shape, "float32")
    files = {name: np.zeros_like(value) for name, value in model.items()}
    stored = {entry.name: np.zeros(entry.shape, np.uint32) for entry in table.entries}
    for device in plan(table, shape, training, rollout).devices:
        shards = trained(model, shape, training, device.ranks.training)
        for parameter in device.training:
            cut, value = slice_of(parameter), shards[parameter.name]
            put(stored[cut.entry], cut.axis, cut.stored, value)
            real = value[:, : cut.size] if cut.axis else value[: cut.size]
            put(files[cut.hf_name], cut.axis, cut.file, real)
    for name, value in model.items():
        assert np.array_equal(files[name], value), name
        entry, piece = table.by_hf_name(name)
        rows = stored[entry.name][slice(*piece.rows)]
        assert np.array_equal(rows if piece.cols is None else rows[:, slice(*piece.cols)], value), name
    assert sum(int((value != 0).sum()) for value in stored.values()) == sum(value.size for value in model.values())


def test_a_shard_of_padding_alone_is_in_no_file() -> None:
    shape = small_shape()  # vocabulary 70, padded to 128
    table = parameter_table(shape, dtype="float32", freeze_vision=False)
    group = plan(table, shape, TrainingLayout(degree=4), RolloutLayout(degree=4))
    cuts = [slice_of(device.training[0]) for device in group.devices]
    assert [(cut.stored, cut.file, cut.size) for cut in cuts] == [
        ((0, 32), (0, 32), 32),
        ((32, 64), (32, 64), 32),
        ((64, 96), (64, 70), 6),
        ((96, 128), (70, 70), 0),
    ]
