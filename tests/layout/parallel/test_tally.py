"""Sums of bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings

from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import plan
from rollplex.layout.parallel.tally import tally, tally_model
from rollplex.layout.parameters import HEADER_BYTES, parameter_table
from rollplex.layout.published import QWEN2_5_VL
from rollplex.layout.shape import ModelShape
from support.layouts import rollouts, shapes, trainings
from support.slices import DEGREES


@given(shape=shapes(), training=trainings, rollout=rollouts)
@settings(max_examples=40, deadline=None)
def test_one_layer_of_each_tower_counted_often_is_the_whole_model(
    shape: ModelShape, training: TrainingLayout, rollout: RolloutLayout
) -> None:
    table = parameter_table(shape, dtype="float32", freeze_vision=False)
    devices = plan(table, shape, training, rollout).devices
    tallies = [tally(device, header_bytes=HEADER_BYTES) for device in devices]
    assert tally_model(shape, training, rollout, dtype="float32") == max(tallies, key=lambda one: one.copied)
    for device, one in zip(devices, tallies, strict=True):
        assert one.stored == device.storage.total_bytes
        assert one.aliased + one.copied == one.rollout


@pytest.mark.parametrize("size", QWEN2_5_VL)
def test_devices_of_a_group_copy_alike_in_the_published_models(size: str) -> None:
    shape = replace(QWEN2_5_VL[size], layers=1, vision=replace(QWEN2_5_VL[size].vision, depth=1))
    table = parameter_table(shape, dtype="bfloat16", freeze_vision=False)
    for training, rollout in product(DEGREES[:3], DEGREES[:3]):
        devices = plan(table, shape, TrainingLayout(degree=training), RolloutLayout(degree=rollout)).devices
        assert len({tally(device, header_bytes=HEADER_BYTES) for device in devices}) == 1


def test_the_32b_trained_on_eight_and_sampled_on_four_devices_shares_half_of_the_rollout_s_weights() -> None:
    one = tally_model(
        QWEN2_5_VL["32B"], TrainingLayout(degree=8), RolloutLayout(degree=4, one_tensor=True), dtype="bfloat16"
    )
    assert (one.aliased, one.refreshed, one.rebuilt) == (8_367_267_584, 8_362_595_584, 0)
    assert one.stored < one.rollout + 100_000, "nothing but the wider shard is stored"
