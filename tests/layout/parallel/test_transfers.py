"""Transfers carried out on real bytes. Those of a plan's own devices are what `support.layouts.verify` carries out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import LayoutPlan, plan
from rollplex.layout.parallel.tally import tally
from rollplex.layout.parallel.transfers import Transfer, target_transfers, transfers
from rollplex.layout.parameters import HEADER_BYTES, parameter_table
from rollplex.layout.shape import ModelShape
from support import layouts
from support.layouts import rollouts, shapes, trainings, verify, verify_target
from support.slices import DEGREES, small_shape


def planned(shape: ModelShape, training: TrainingLayout, rollout: RolloutLayout, *, frozen: bool = False) -> LayoutPlan:
    return plan(parameter_table(shape, dtype="float32", freeze_vision=frozen), shape, training, rollout)


def target_of(shape: ModelShape, rollout: RolloutLayout, *, frozen: bool = False) -> LayoutPlan:
    """Of devices that only sample."""
    same = TrainingLayout(degree=rollout.degree, vision_sharded=rollout.vision_sharded)
    return planned(shape, same, rollout, frozen=frozen)


@given(shape=shapes(), training=trainings, rollout=rollouts)
@settings(max_examples=40, deadline=None)
def test_a_device_that_only_samples_is_filled_from_those_that_train(
    shape: ModelShape, training: TrainingLayout, rollout: RolloutLayout
) -> None:
    trainers = planned(shape, training, RolloutLayout(degree=training.degree))
    verify_target(trainers, target_of(shape, rollout), shape, "float32")


@pytest.mark.parametrize(("training", "rollout"), list(product(DEGREES, DEGREES)))
def test_every_pair_of_degrees_fills_a_target(training: int, rollout: int) -> None:
    shape = small_shape()
    trainers = planned(shape, TrainingLayout(degree=training), RolloutLayout(degree=training))
    target = target_of(shape, RolloutLayout(degree=rollout))
    verify_target(trainers, target, shape, "float32")
    for device in target.devices:
        found = target_transfers(trainers, device, trained_only=False)
        assert sum(one.size_bytes for one in found) == sum(p.size_bytes for p in device.rollout), "padding is cut, too"


@given(shape=shapes(), training=trainings, rollout=rollouts)
@settings(max_examples=40, deadline=None)
def test_bytes_are_those_of_the_tally(shape: ModelShape, training: TrainingLayout, rollout: RolloutLayout) -> None:
    for device in planned(shape, training, rollout).devices:
        sums = {"refresh": 0, "rebuild": 0}
        for transfer in transfers(device, trained_only=False):
            sums[transfer.kind] += transfer.size_bytes
        counted = tally(device, header_bytes=HEADER_BYTES)
        assert (sums["refresh"], sums["rebuild"]) == (counted.refreshed, counted.rebuilt)


def test_frozen_weights_are_copied_at_load_alone() -> None:
    shape = small_shape(kv_heads=4)
    group = planned(shape, TrainingLayout(degree=4), RolloutLayout(degree=2), frozen=True)
    target = target_of(shape, RolloutLayout(degree=2), frozen=True).devices[1]

    def towers(found: tuple[Transfer, ...]) -> set[bool]:
        return {one.parameter.startswith("visual.") for one in found}

    for device in group.devices:
        assert towers(transfers(device, trained_only=False)) == {True, False}
        assert towers(transfers(device, trained_only=True)) == {False}
    trainers = planned(shape, TrainingLayout(degree=4), RolloutLayout(degree=4), frozen=True)
    assert towers(target_transfers(trainers, target, trained_only=False)) == {True, False}
    assert towers(target_transfers(trainers, target, trained_only=True)) == {False}


def off_by_one(real: Callable[..., tuple[Transfer, ...]], which: str, number: int) -> Callable[..., Any]:
    """The transfers with one that starts a number too late, in its source or its target."""

    def wrong(*arguments: Any, **options: Any) -> tuple[Transfer, ...]:
        found = list(real(*arguments, **options))
        if found:
            at = number % len(found)
            place = getattr(found[at], which)
            found[at] = replace(found[at], **{which: replace(place, offset=place.offset + 4)})
        return tuple(found)

    return wrong


@given(number=st.integers(0, 10_000), which=st.sampled_from(["source", "target"]))
@settings(max_examples=30, deadline=None)
def test_a_transfer_that_is_one_number_off_is_caught(number: int, which: str) -> None:
    shape = small_shape(kv_heads=4, vocab=128)  # no padding, which is zeros one number on, too
    shape = replace(shape, vision=replace(shape.vision, intermediate=48))
    group = planned(shape, TrainingLayout(degree=4), RolloutLayout(degree=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "transfers", off_by_one(transfers, which, number))
        with pytest.raises(AssertionError):
            verify(group, shape, "float32")
        patch.setattr(layouts, "target_transfers", off_by_one(target_transfers, which, number))
        trainers = planned(shape, TrainingLayout(degree=4), RolloutLayout(degree=4))
        with pytest.raises(AssertionError):
            verify_target(trainers, target_of(shape, RolloutLayout(degree=2)), shape, "float32")
