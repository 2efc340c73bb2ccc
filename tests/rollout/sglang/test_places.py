"""A rank's parameters of SGLang's model: where they lie, and that what is attached there is what SGLang's own weight
loaders would have filled the rank with. Module trees stand in for SGLang's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from rollplex.errors import ConfigError, ModelError
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import DevicePlan, plan
from rollplex.layout.parameters import parameter_table
from rollplex.memory.tensors import require_mapped
from rollplex.protocol.common import Kind, Parallel
from rollplex_rollout.sglang.aliasing import alias, copy, named, renew, require_copies
from rollplex_rollout.sglang.places import Places, of_rank, places, whole
from support.layouts import carried_out
from support.segments import HostSegments
from support.slices import full_model, sampled, small_shape

DTYPE = "float32"
SHAPE = small_shape()
TABLE = parameter_table(SHAPE, dtype=DTYPE, freeze_vision=False)
MODEL = full_model(SHAPE, DTYPE)
DEGREES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (2, 4), (4, 2), (4, 4), (1, 8), (8, 8)]
"""Of training and rollout. The model has 2 K/V heads: with more rollout ranks several hold the same."""


@pytest.fixture
def segments() -> Iterator[HostSegments]:
    made = HostSegments()
    yield made
    made.close()


def stand_in(places: Places) -> nn.Module:
    """A module tree with SGLang's names, in the shapes of one rank."""
    root = nn.Module()
    for at in places.parameters:
        *path, leaf = at.name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(torch.empty(at.shape), requires_grad=False))
    return root


def at_of(training: int, rollout: int, device: int) -> Places:
    return places(TABLE, SHAPE, Parallel(training=training, rollout=rollout, device=device, meet="unused"))


@pytest.mark.parametrize(("training", "rollout"), DEGREES)
def test_what_a_rank_attaches_is_its_slice_of_the_full_tensors(
    segments: HostSegments, training: int, rollout: int
) -> None:
    layout = RolloutLayout(degree=rollout, one_tensor=True)
    group = plan(TABLE, SHAPE, TrainingLayout(degree=training), layout)
    filled = carried_out(group, SHAPE, DTYPE)
    for device in group.devices:
        number = device.ranks.device
        ref = segments.create(Kind.ACTOR_WEIGHTS, device.storage.total_bytes)
        mapping = segments.map_again(ref)
        mapping.write(0, filled.content(number))
        rank = at_of(training, rollout, number)
        assert rank.total_bytes == device.storage.total_bytes
        model = stand_in(rank)
        assert alias(model, mapping, rank) == rank.offsets
        require_mapped(mapping, named(model))
        expected = sampled(MODEL, SHAPE, layout, device.ranks.rollout)
        found = named(model)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert np.array_equal(found[name].data.view(torch.int32).numpy().view(np.uint32), value), name


def test_one_rank_with_all_of_the_model_has_the_parameter_table_itself() -> None:
    """Also where training has several ranks: their shards lie within the stored tensors."""
    assert at_of(1, 1, 0) == whole(TABLE)
    for training in (2, 4):
        assert all(at_of(training, 1, device) == whole(TABLE) for device in range(training))


def test_only_what_no_storage_serves_is_a_copy() -> None:
    def rebuilt(training: int, rollout: int) -> set[str]:
        return {at.name.split(".")[-2] for at in at_of(training, rollout, 0).parameters if at.rebuilt}

    assert rebuilt(2, 2) == rebuilt(4, 2) == set()
    assert rebuilt(1, 2) == {"qkv_proj", "gate_up_proj"}
    columns = {at.name: at for at in at_of(1, 2, 1).parameters}["model.layers.0.self_attn.o_proj.weight"]
    assert columns.shape == (SHAPE.hidden, 16)
    assert columns.strides == (32, 1), "rows of the whole"
    assert columns.span == 32 * (SHAPE.hidden - 1) + 16


def test_missing_and_surplus_parameters_of_a_rank_are_listed(segments: HostSegments) -> None:
    rank = at_of(2, 2, 1)
    mapping = segments.map_again(segments.create(Kind.ACTOR_WEIGHTS, rank.total_bytes))
    first, second = (at.name for at in rank.parameters[:2])
    model = stand_in(rank)
    with pytest.raises(ModelError, match=f"1 missing: {first}"):
        alias(without(model, first), mapping, rank)
    whole_model = stand_in(whole(TABLE))
    whole_model.register_parameter("extra", nn.Parameter(torch.zeros(1), requires_grad=False))
    with pytest.raises(ModelError, match="1 surplus: extra") as caught:
        alias(whole_model, mapping, rank)
    assert "different: " in caught.value.got, "another rank's shapes"
    assert second not in caught.value.needed


def without(model: nn.Module, name: str) -> nn.Module:
    path, _, leaf = name.rpartition(".")
    delattr(model.get_submodule(path), leaf)
    return model


def test_copies_of_strided_parameters_are_renewed(segments: HostSegments) -> None:
    rank = at_of(1, 2, 1)
    mapping = segments.map_again(segments.create(Kind.ACTOR_WEIGHTS, rank.total_bytes))
    model = stand_in(rank)
    copy(model, mapping, rank)
    mapping.write(0, np.full(rank.total_bytes // 4, 3.5, np.float32).tobytes())
    renew(named(model), mapping, rank)
    require_copies(named(model), mapping, rank)
    assert all(bool((value == 3.5).all()) for value in named(model).values())


def test_a_plan_for_an_engine_that_takes_parts_apart_is_no_table_for_sglang() -> None:
    apart: DevicePlan = plan(TABLE, SHAPE, TrainingLayout(degree=1), RolloutLayout(degree=2)).devices[0]
    with pytest.raises(AssertionError, match="lies in parts"):
        of_rank(apart, dtype=DTYPE)
    with pytest.raises(ConfigError, match="do not nest"):
        at_of(2, 3, 0)
