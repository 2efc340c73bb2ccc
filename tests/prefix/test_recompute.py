"""A prefix that keeps nothing between forward and backward, against one that keeps everything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rollplex.errors import StaleWeightsError, StateError
from rollplex.memory.predict import prefix_activation_bytes
from rollplex.protocol.common import Kind, LeaseRef
from rollplex.protocol.prefix import Activations, Which
from support.prefix import VERSION, World

MakeWorld = Callable[..., World]
ALL = (0, 1, 2, 3)
WORKSPACE = LeaseRef(lease=77, kind=Kind.WORKSPACE, size_bytes=2**24)


def given_gradients(world: World, unit: int) -> None:
    """What a trainer would leave, of numbers that depend on nothing but their places."""
    kv = world.unit_views(unit)
    draw = torch.Generator().manual_seed(unit)
    for gradient in (*kv.d_keys, *kv.d_values, kv.d_last_hidden):
        gradient.copy_(torch.randn(gradient.shape, generator=draw))


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: value.contiguous().view(torch.uint8).numpy().tobytes() for name, value in tensors.items()}


def recompute(
    world: World, *groups: int, unit: int, copies: int = 1, activations: Activations = Activations.RECOMPUTE
) -> None:
    answer = world.forward(Which.ACTOR, groups, unit, copies=copies, activations=activations, lease=None)
    assert answer.held == ()


@pytest.mark.parametrize("activations", [Activations.RECOMPUTE, Activations.RECOMPUTE_LAYERS])
@pytest.mark.parametrize("copies", [1, 3], ids=["shared", "replicated"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("freeze_vision", [False, True], ids=["vision trained", "vision frozen"])
def test_segment_and_gradients_are_those_of_what_is_kept_bit_for_bit(
    make_world: MakeWorld, copies: int, dtype: str, freeze_vision: bool, activations: Activations
) -> None:
    kept, again = (make_world(dtype=dtype, freeze_vision=freeze_vision) for _ in range(2))
    kept.forward(Which.ACTOR, (0, 1), 0, copies=copies)
    kept.forward(Which.ACTOR, (2, 3), 1, copies=copies)
    recompute(again, 0, 1, unit=0, copies=copies, activations=activations)
    recompute(again, 2, 3, unit=1, copies=copies, activations=activations)
    for unit in (0, 1):
        ours, theirs = again.unit_views(unit), kept.unit_views(unit)
        for one, other in zip(
            (*ours.keys, *ours.values, ours.last_hidden),
            (*theirs.keys, *theirs.values, theirs.last_hidden),
            strict=True,
        ):
            assert torch.equal(one, other)
    for world in (kept, again):
        for unit in (0, 1):
            given_gradients(world, unit)
    for unit in (0, 1):
        kept.backward(unit)
        again.backward(unit, workspace=WORKSPACE)
    assert any(bool(value.any()) for value in kept.gradients.values())
    assert bits(kept.gradients) == bits(again.gradients)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("freeze_vision", [False, True], ids=["vision trained", "vision frozen"])
def test_with_the_inputs_of_layers_too(make_world: MakeWorld, dtype: str, freeze_vision: bool) -> None:
    kept, layers = (make_world(dtype=dtype, freeze_vision=freeze_vision) for _ in range(2))
    held = [
        world.forward(Which.ACTOR, ALL, 0, copies=2, activations=activations).held[0].size_bytes
        for world, activations in ((kept, Activations.KEEP), (layers, Activations.LAYERS))
    ]
    assert held[1] < 0.7 * held[0]
    ours, theirs = layers.unit_views(0), kept.unit_views(0)
    for one, other in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
        assert torch.equal(one, other)
    for world in (kept, layers):
        given_gradients(world, 0)
        world.backward(0)
    assert bits(kept.gradients) == bits(layers.gradients)
    assert len(layers.kv) == 1


def test_a_forward_after_one_that_kept_inputs_keeps_everything_again(make_world: MakeWorld) -> None:
    world = make_world()
    first = world.forward(Which.ACTOR, ALL, 0).held[0].size_bytes
    world.forward(Which.ACTOR, ALL, 1, activations=Activations.LAYERS)
    assert world.forward(Which.ACTOR, ALL, 2).held[0].size_bytes == first


def test_the_backward_says_what_it_held_and_leaves_nothing(make_world: MakeWorld) -> None:
    world = make_world()
    recompute(world, *ALL, unit=0)
    given_gradients(world, 0)
    (held,) = world.backward(0, workspace=WORKSPACE).held
    slots = world.slots
    predicted = prefix_activation_bytes(
        world.shape,
        rows=len(slots),
        tokens=max(slot.tokens for slot in slots),
        grids=[(m.frames, m.height, m.width) for slot in slots for m in slot.media],
        freeze_vision=False,
        dtype="float32",
    )
    assert held.lease == WORKSPACE.lease
    assert held.size_bytes == pytest.approx(predicted, rel=0.05)
    assert world.kv[0][0].segment not in world.segments.attached
    world.service._units.require_empty()


def test_a_backward_by_layers_holds_what_keeping_their_inputs_would(make_world: MakeWorld) -> None:
    kept, again = make_world(), make_world()
    held = kept.forward(Which.ACTOR, ALL, 0, activations=Activations.LAYERS).held[0].size_bytes
    recompute(again, *ALL, unit=0, activations=Activations.RECOMPUTE_LAYERS)
    given_gradients(again, 0)
    (answer,) = again.backward(0, workspace=WORKSPACE).held
    assert answer.size_bytes == pytest.approx(held, rel=0.05)


def test_nothing_of_the_model_is_kept_after_the_forward(make_world: MakeWorld) -> None:
    world = make_world()
    recompute(world, *ALL, unit=0)
    kept = world.service._units._actor[0].kept
    assert not any(isinstance(value, Tensor) for value in vars(kept).values())


def test_a_forward_can_only_run_again_under_a_workspace_and_on_the_same_weights(make_world: MakeWorld) -> None:
    world = make_world()
    recompute(world, *ALL, unit=0)
    given_gradients(world, 0)
    with pytest.raises(StateError, match="prefix unit 0 kept no graph.*no workspace.*workspace"):
        world.backward(0)
    recompute(world, *ALL, unit=1)
    world.publish(VERSION + 1)
    with pytest.raises(StaleWeightsError):
        world.backward(1, workspace=WORKSPACE)
