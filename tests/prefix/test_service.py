"""The prefix service in one process: what it exports, what it adds, what it refuses, what it holds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, autograd

from rollplex.errors import ModelError, SegmentError, StaleWeightsError, StateError
from rollplex.layout.parameters import gradient_table
from rollplex.memory.digest import digest
from rollplex.memory.tensors import padding
from rollplex.model.responses import join_values
from rollplex.protocol.common import Committed, DigestRequest, Responses
from rollplex.protocol.prefix import Which
from rollplex_prefix.service import PrefixService
from support.prefix import STEP, VERSION, Trainer, World, distance, weights_for

MakeWorld = Callable[..., World]
ALL = (0, 1, 2, 3)
TOLERANCE = 1e-5


def split_tokens(response: Responses) -> list[list[int]]:
    """The token lists of one group's samples."""
    flat = np.frombuffer(response.tokens, "<i4")
    return [part.tolist() for part in np.split(flat, np.cumsum(response.lengths)[:-1])]


def grads_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_loading_tells_the_size_of_the_parameter_table(make_world: MakeWorld) -> None:
    world = make_world()
    assert world.loaded.table_bytes == world.table.total_bytes


def test_nothing_works_before_loading(make_world: MakeWorld) -> None:
    world = make_world()
    world.service = PrefixService(world.segments)
    for act in (
        lambda: world.forward(Which.ACTOR, ALL, 0),
        lambda: world.backward(0),
        lambda: world.send(DigestRequest(cause=1)),
        lambda: world.send(Committed(cause=1, version=VERSION)),
    ):
        with pytest.raises(StateError, match="before the model is loaded.*LoadPrefix first"):
            act()


def test_another_parameter_table_is_refused_with_both_hashes(make_world: MakeWorld) -> None:
    world = make_world()
    other = replace(world.load, model=replace(world.load.model, table_hash="0" * 64))
    with pytest.raises(ModelError, match=f"{world.table.hash}.*{'0' * 64}"):
        PrefixService(world.segments).handle(other, lambda _: None)


@pytest.mark.parametrize("copies", [1, 3], ids=["shared", "replicated"])
@pytest.mark.parametrize("freeze_vision", [False, True], ids=["vision trained", "vision frozen"])
def test_reference_scores_are_those_of_a_full_forward_of_the_reference_weights(
    make_world: MakeWorld, responses: list[Responses], copies: int, freeze_vision: bool
) -> None:
    world = make_world(freeze_vision=freeze_vision)
    world.forward(Which.REFERENCE, ALL, 7, copies=copies)
    scored = [world.score(7, responses[:1], suffix_unit=4), world.score(7, responses[1:], suffix_unit=5)]
    assert [answer.suffix_unit for answer in scored] == [4, 5]
    logprobs = [item for answer in scored for item in answer.logprobs]
    assert [item.group for item in logprobs] == list(ALL)
    reference, actor = world.stock(Which.REFERENCE), world.stock(Which.ACTOR)
    with torch.no_grad():
        for response, item in zip(responses, logprobs, strict=True):
            ours = np.frombuffer(item.values, "<f8")
            samples = split_tokens(response)
            truth = torch.cat([world.logprobs(reference, response.group, tokens) for tokens in samples])
            assert ours == pytest.approx(truth.double().numpy(), abs=TOLERANCE)
            others = torch.cat([world.logprobs(actor, response.group, tokens) for tokens in samples])
            assert abs(ours - others.double().numpy()).max() > 0.01, "the two models must be told apart"


def test_without_a_reference_its_prefix_is_refused(make_world: MakeWorld) -> None:
    world = make_world(with_reference=False)
    with pytest.raises(StateError, match="a reference prefix without a reference"):
        world.forward(Which.REFERENCE, ALL, 0)


@pytest.mark.parametrize("copies", [1, 3], ids=["shared", "replicated"])
def test_the_actor_forward_leaves_keys_values_and_last_hidden_states_in_the_segment(
    make_world: MakeWorld, copies: int
) -> None:
    world = make_world()
    world.forward(Which.ACTOR, ALL, 2, copies=copies)
    kv, model = world.unit_views(2), world.stock(Which.ACTOR)
    assert kv.last_hidden.shape[0] == len(ALL) * copies
    with torch.no_grad():
        for row in range(len(ALL) * copies):
            keys, values, last_hidden = world.prefix(model, row // copies)
            tokens = keys[0].shape[1]
            for ours, truth in zip((*kv.keys, *kv.values), (*keys, *values), strict=True):
                assert torch.allclose(ours[row, :, :tokens], truth, rtol=TOLERANCE, atol=TOLERANCE)
                assert torch.isfinite(ours[row]).all(), "padding may be anything but not NaN"
            assert torch.allclose(kv.last_hidden[row], last_hidden, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("copies", [1, 3], ids=["shared", "replicated"])
@pytest.mark.parametrize("freeze_vision", [False, True], ids=["vision trained", "vision frozen"])
def test_prefix_and_suffix_backward_together_are_a_full_backward(
    make_world: MakeWorld, responses: list[Responses], copies: int, freeze_vision: bool
) -> None:
    world = make_world(freeze_vision=freeze_vision)
    weights = weights_for(responses)
    trainer = Trainer(world)
    world.forward(Which.ACTOR, ALL, 0, copies=copies)
    trainer.train(0, ALL, responses, weights)
    world.backward(0)
    model = world.stock(Which.ACTOR)
    row = 0
    for response in responses:
        for tokens in split_tokens(response):
            autograd.backward((world.logprobs(model, response.group, tokens) * weights[row, : len(tokens)]).sum())
            row += 1
    truth = grads_of(model)
    assert any("visual" in name for name in truth) is not freeze_vision
    assert distance(trainer.total(), truth) < TOLERANCE
    assert not any(gap.any() for gaps in padding(world.gradients, gradient_table(world.table)).values() for gap in gaps)


def test_units_of_a_step_add_up_in_an_arena_that_is_zeroed_at_the_first_backward_of_each_step(
    make_world: MakeWorld, responses: list[Responses]
) -> None:
    world = make_world()

    def units(step: int, *numbers: int) -> dict[str, Tensor]:
        """The arena after these one-prompt units of a step, all forward passes first."""
        for unit in numbers:
            world.forward(Which.ACTOR, (unit,), unit, step=step)
        for unit in numbers:
            some = responses[unit : unit + 1]
            Trainer(world).train(unit, (unit,), some, weights_for(some))
            world.backward(unit, step=step)
        return {name: value.clone() for name, value in world.gradients.items()}

    one, other, both = units(6, 0), units(7, 2), units(8, 0, 2)
    assert any(bool(value.any()) for value in one.values())
    for name, value in both.items():
        assert torch.equal(value, one[name] + other[name]), name


def test_a_unit_alone_and_beside_others_gives_the_same_bits(make_world: MakeWorld) -> None:
    alone, beside = make_world(), make_world()
    for unit in (5, 6):
        beside.forward(Which.REFERENCE, ALL, unit)
        beside.forward(Which.ACTOR, (1, 3), unit)
    for world in (alone, beside):
        world.forward(Which.ACTOR, (0, 2), 0)
    ours, theirs = alone.unit_views(0), beside.unit_views(0)
    assert all(torch.equal(a, b) for a, b in zip(ours.keys, theirs.keys, strict=True))
    assert torch.equal(ours.last_hidden, theirs.last_hidden)


def test_an_actor_forward_needs_a_segment_of_the_size_of_its_layout(make_world: MakeWorld) -> None:
    world = make_world()
    with pytest.raises(StateError, match="needs a segment for its K/V"):
        world.forward(Which.ACTOR, ALL, 0, kv=None)
    small = world.forward_message(Which.ACTOR, (1,), 1)
    with pytest.raises(SegmentError, match="smaller than what it should hold"):
        world.forward(Which.ACTOR, ALL, 2, kv=small.kv)


@pytest.mark.parametrize("which", list(Which))
def test_a_forward_on_another_version_is_refused_before_anything_is_read(make_world: MakeWorld, which: Which) -> None:
    world = make_world()
    attached = world.segments.attached
    with pytest.raises(StaleWeightsError, match=f"got version {VERSION}, STABLE; needed version {VERSION + 1}"):
        world.forward(which, ALL, 0, version=VERSION + 1)
    assert world.segments.attached == attached
    world.header.begin_update(VERSION)
    with pytest.raises(StaleWeightsError, match="UPDATING"):
        world.forward(which, ALL, 0)
    assert world.segments.attached == attached


@pytest.mark.parametrize("which", list(Which))
def test_a_forward_during_which_the_weights_move_is_refused_when_it_is_done(
    make_world: MakeWorld, which: Which
) -> None:
    world = make_world()
    message = world.forward_message(which, ALL, 0)

    def move(ref: object) -> None:
        if ref == world.inputs:
            world.publish(VERSION + 1)

    world.segments.before_attach = move
    with pytest.raises(StaleWeightsError, match=f"got version {VERSION + 1}, STABLE; needed version {VERSION}"):
        world.send(message)


def test_a_backward_needs_its_version_before_and_after(make_world: MakeWorld) -> None:
    world = make_world()
    for unit in (0, 1):
        world.forward(Which.ACTOR, ALL, unit)
        world.unit_views(unit).gradients.zero_()
    with pytest.raises(StaleWeightsError, match=f"needed version {VERSION + 1}"):
        world.backward(0, version=VERSION + 1)
    world.segments.before_detach = lambda _: world.header.begin_update(VERSION)
    with pytest.raises(StaleWeightsError, match="UPDATING"):
        world.backward(1)


def test_after_a_commit_the_header_is_read_again_and_the_inputs_are_given_back(make_world: MakeWorld) -> None:
    world = make_world()
    world.forward(Which.ACTOR, ALL, 0)
    world.unit_views(0).gradients.zero_()
    world.backward(0)
    assert world.inputs.segment in world.segments.attached
    with pytest.raises(StaleWeightsError, match=f"got version {VERSION}"):
        world.send(Committed(cause=1, version=VERSION + 1))
    world.header.begin_update(VERSION)
    with pytest.raises(StaleWeightsError, match="UPDATING"):
        world.send(Committed(cause=1, version=VERSION + 1))
    world.header.publish(VERSION + 1, digest(world.pages, world.table))
    assert world.send(Committed(cause=1, version=VERSION + 1)).version == VERSION + 1
    assert world.inputs.segment not in world.segments.attached
    world.forward(Which.ACTOR, ALL, 0, version=VERSION + 1, step=STEP + 1)


def test_a_digest_is_of_the_weights_as_this_process_sees_them_now(make_world: MakeWorld) -> None:
    world = make_world()
    before = world.send(DigestRequest(cause=1))
    assert (before.version, before.digest) == (VERSION, digest(world.pages, world.table))
    next(iter(world.weights.values())).view(-1)[0].add_(1)
    after = world.send(DigestRequest(cause=2))
    assert after.digest == digest(world.pages, world.table) != before.digest
    world.publish(VERSION + 1)
    assert world.send(DigestRequest(cause=3)).version == VERSION + 1


def test_a_prefix_that_computes_with_a_copy_of_the_weights_is_found_out(make_world: MakeWorld) -> None:
    world = make_world()
    model = world.service._ready.actor
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    with pytest.raises(SegmentError, match="A parameter is not in the segment"):
        world.send(DigestRequest(cause=1))


def test_scores_survive_the_way_to_the_trainer(make_world: MakeWorld, responses: list[Responses]) -> None:
    world = make_world()
    world.forward(Which.REFERENCE, ALL, 0)
    values = join_values(world.score(0, responses).logprobs, responses)
    mask = values != 0
    assert mask.sum(1).tolist() == [length for response in responses for length in response.lengths]
    assert (values[mask] < 0).all()
