"""TrainWhole: the slow path on the same messages, and that its gradients can only be looked at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from torch import Tensor

from rollplex.errors import ProtocolError, StaleWeightsError, StateError
from rollplex.memory.predict import whole_saved_bytes
from rollplex.protocol.codec import CHANNELS
from rollplex.protocol.common import Role
from rollplex.protocol.trainer import Loss, SkipUpdate, SuffixTrained, WholeTrained
from support.trainer import Sampled, World, apply, prepare, train_all, whole_message

MakeWorld = Callable[..., World]
UNCLIPPED = {"max_grad_norm": 0.0}


def logprobs_of(answer: SuffixTrained | WholeTrained) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
    return [np.frombuffer(item.values, dtype="<f8") for item in answer.logprobs]


def assert_close(got: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float) -> None:
    floor = 1e-3 * max(float(value.abs().max()) for value in truth.values())
    for name, value in truth.items():
        scale = max(float(value.abs().max()), floor)
        assert float((got[name] - value).abs().max()) / scale < tolerance, name


@pytest.mark.parametrize("loss", list(Loss))
@pytest.mark.parametrize("freeze", [False, True], ids=["vision-trained", "vision-frozen"])
def test_log_probabilities_gradients_and_metrics_are_those_of_the_split(
    make_world: MakeWorld, groups: list[Sampled], loss: Loss, freeze: bool
) -> None:
    split, whole = (make_world(freeze_vision=freeze, algorithm={"loss": loss}, optimizer=UNCLIPPED) for _ in range(2))
    ref, state = split.prefix()
    answer = split.send(msgspec.structs.replace(split.train_message(ref, groups), return_logprobs=True))
    split.clear_prefix_arena()
    split.prefix_backward(ref, state)
    vote = prepare(split)

    for gradient in whole.prefix_gradients.values():
        gradient.fill_(float("nan"))  # of an earlier step; nobody may look at it
    other = whole.send(whole_message(whole, groups))
    for ours, theirs, group in zip(logprobs_of(answer), logprobs_of(other), groups, strict=True):
        assert len(theirs) == sum(map(len, group.tokens))
        assert np.abs(ours - theirs).max() < 1e-5
    other_vote = prepare(whole)
    assert other_vote.finite
    assert other_vote.metrics == pytest.approx(vote.metrics, rel=1e-5, abs=1e-6)
    assert all(bool(gradient.any()) for gradient in whole.gradients.values())
    assert_close(split.gradients, whole.gradients, 1e-5)


def test_a_qwen2_vl_is_trained_alike_in_both_ways(
    make_world: MakeWorld, older_folder: Path, groups: list[Sampled]
) -> None:
    split, whole = (make_world(folder=older_folder, optimizer=UNCLIPPED) for _ in range(2))
    train_all(split, groups)
    vote = prepare(split)
    whole.send(whole_message(whole, groups))
    assert prepare(whole).metrics == pytest.approx(vote.metrics, rel=1e-5, abs=1e-6)
    assert all(bool(gradient.any()) for gradient in whole.gradients.values())
    assert_close(split.gradients, whole.gradients, 1e-5)


def test_a_planted_error_in_one_parameter_shows(make_world: MakeWorld, groups: list[Sampled]) -> None:
    split, whole = make_world(optimizer=UNCLIPPED), make_world(optimizer=UNCLIPPED)
    train_all(split, groups)
    split.prefix_gradients["model.layers.0.mlp.down_proj.weight"].mul_(1.1)
    prepare(split)
    whole.send(whole_message(whole, groups))
    prepare(whole)
    with pytest.raises(AssertionError, match="down_proj"):
        assert_close(split.gradients, whole.gradients, 1e-3)


def test_its_gradients_can_be_skipped_and_never_applied(make_world: MakeWorld, groups: list[Sampled]) -> None:
    world, clean = make_world(), make_world()
    before = world.header.require(0).digest
    world.send(whole_message(world, groups))
    assert prepare(world).finite
    with pytest.raises(StateError, match="apply the update"):
        apply(world)
    world.send(SkipUpdate(cause=92, step=0))
    assert world.header.require(0).digest == before
    assert not any(bool(gradient.any()) for gradient in world.gradients.values())
    for each in (world, clean):
        train_all(each, groups)
        assert prepare(each).finite
    assert apply(world).digest == apply(clean).digest, "nothing of the skipped step is left"


def test_whole_sequences_are_alone_in_their_step(make_world: MakeWorld, groups: list[Sampled]) -> None:
    world, other = make_world(), make_world()
    world.send(whole_message(world, groups))
    ref, _ = world.prefix()
    with pytest.raises(StateError, match="trained alone"):
        world.send(world.train_message(ref, groups))
    with pytest.raises(StateError, match="trained alone"):
        world.send(whole_message(world, groups))
    ref, _ = other.prefix()
    other.send(other.train_message(ref, groups))
    with pytest.raises(StateError, match="trained alone"):
        other.send(whole_message(other, groups))


def test_what_does_not_fit_together_is_refused(make_world: MakeWorld, groups: list[Sampled]) -> None:
    world = make_world()
    message = whole_message(world, groups)
    with pytest.raises(StaleWeightsError, match="version 0"):
        world.send(msgspec.structs.replace(message, version=1))
    with pytest.raises(ProtocolError, match="whole sequences of step 0: .*not those of their prompts"):
        world.send(msgspec.structs.replace(message, prompts=message.prompts[::-1]))
    with pytest.raises(ProtocolError, match="no reference"):
        world.send(msgspec.structs.replace(message, reference_logprobs=()))


def test_inputs_are_unmapped_and_the_graph_is_what_shapes_predict(make_world: MakeWorld, groups: list[Sampled]) -> None:
    world = make_world()
    message = whole_message(world, groups)
    answer = world.send(message)
    assert message.inputs.segment not in world.segments.attached
    (held,) = answer.held
    assert held.lease == message.workspace.lease
    said = max(
        whole_saved_bytes(
            world.shape,
            tokens=prompt.slot.tokens + max(map(len, group.tokens)),
            grids=[(m.frames, m.height, m.width) for m in prompt.slot.media],
            freeze_vision=False,
            dtype="float32",
        )
        for prompt, group in zip(world.prompts, groups, strict=True)
    )
    assert 0.9 * said <= held.size_bytes <= said


def test_the_suffix_answers_with_log_probabilities_only_when_asked(
    make_world: MakeWorld, groups: list[Sampled]
) -> None:
    world = make_world()
    ref, _ = world.prefix()
    assert world.send(world.train_message(ref, groups[:1], release=False)).logprobs == ()
    asked = world.train_message(ref, groups[1:], start=1, unit=1, first=False)
    answer = world.send(msgspec.structs.replace(asked, return_logprobs=True))
    assert [item.group for item in answer.logprobs] == [1, 2]
    codec = CHANNELS[Role.TRAINER].from_worker
    assert codec.decode(codec.encode(answer)) == answer
