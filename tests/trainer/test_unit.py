"""Suffix units off the wire: what is read, what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rollplex.errors import ProtocolError
from rollplex.protocol.common import Kind, Logprobs, SegmentRef
from rollplex.protocol.trainer import Scale, TrainSuffix
from rollplex_trainer.unit import SuffixUnit, read_unit
from support.trainer import Sampled, World, apply, prepare

KV = SegmentRef(segment=99, kind=Kind.ACTOR_PREFIX_KV, size_bytes=1)


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


def read(world: World, message: TrainSuffix, **changes: Any) -> SuffixUnit:
    algorithm = msgspec.structs.replace(world.algorithm, **changes)
    return read_unit(message, algorithm, world.shape.vocab)


def test_rows_are_samples_in_the_order_of_groups(world: World, groups: list[Sampled]) -> None:
    unit = read(world, world.train_message(KV, groups[1:], start=1))
    rows = [(group, i) for group in groups[1:] for i in range(3)]
    assert unit.lengths.tolist() == [len(group.tokens[i]) for group, i in rows]
    assert unit.reference is not None
    for row, (group, i) in enumerate(rows):
        n = len(group.tokens[i])
        assert unit.tokens[row, :n].tolist() == group.tokens[i]
        assert unit.rollout[row, :n].tolist() == group.rollout[i]
        assert unit.reference[row, :n].tolist() == group.reference[i]
    assert unit.advantages.shape == unit.weights.shape == (6,)
    assert unit.advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert unit.weights.tolist() == [1.0] * 6


@pytest.mark.parametrize(("copies", "rows"), [(1, slice(1, 3)), (3, slice(3, 9))])
def test_groups_find_their_rows_of_the_prefix_unit(
    world: World, groups: list[Sampled], copies: int, rows: slice
) -> None:
    assert read(world, world.train_message(KV, groups[1:], start=1, copies=copies)).prefix_rows == rows


def test_a_missing_reference_is_refused_only_where_it_is_needed(world: World, groups: list[Sampled]) -> None:
    message = msgspec.structs.replace(world.train_message(KV, groups), reference_logprobs=())
    with pytest.raises(ProtocolError, match="reference"):
        read(world, message)
    assert read(world, message, beta=0.0).reference is None


def floats(*values: float) -> bytes:
    return np.array(values).astype("<f8").tobytes()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (lambda m: {"responses": m.responses[::-1]}, "log-probabilities are of other groups|no consecutive prompts"),
        (lambda m: {"prompts": m.prompts[:2]}, "no consecutive prompts"),
        (lambda m: {"prompts": (m.prompts[0], m.prompts[2], m.prompts[1])}, "no consecutive prompts"),
        (lambda m: {"copies": 2}, "2 copies"),
        (lambda m: {"rewards": m.rewards[:2]}, "other rewards than samples"),
        (lambda m: {"rewards": (*m.rewards[:2], floats(1, 2))}, "other rewards than samples"),
        (lambda m: {"rewards": (*m.rewards[:2], b"1234567")}, "no float64"),
        (lambda m: {"rewards": (*m.rewards[:2], floats(1, math.inf, 2))}, "infinite"),
        (lambda m: {"rollout_logprobs": m.rollout_logprobs[:2]}, "other groups"),
        (lambda m: {"reference_logprobs": (*m.reference_logprobs[:2], Logprobs(group=2, values=b""))}, "wrong size"),
        (lambda m: {"responses": tuple(_with_token(r, 70) for r in m.responses)}, "outside the vocabulary"),
        (lambda m: {"responses": tuple(_with_token(r, -1) for r in m.responses)}, "outside the vocabulary"),
        (lambda m: {"responses": tuple(_truncated(r) for r in m.responses)}, "wrong size"),
    ],
)
def test_parts_that_disagree_are_refused(
    world: World, groups: list[Sampled], changes: Callable[[TrainSuffix], dict[str, Any]], says: str
) -> None:
    message = world.train_message(KV, groups)
    read(world, message)
    with pytest.raises(ProtocolError, match=says):
        read(world, msgspec.structs.replace(message, **changes(message)))


def _with_token(responses: Any, token: int) -> Any:
    tokens = np.frombuffer(responses.tokens, "<i4").copy()
    tokens[0] = token
    return msgspec.structs.replace(responses, tokens=tokens.tobytes())


def _truncated(responses: Any) -> Any:
    return msgspec.structs.replace(responses, tokens=responses.tokens[:-4])


def test_groups_of_unequal_size_are_refused(world: World, groups: list[Sampled]) -> None:
    message = world.train_message(KV, groups)
    last = message.responses[-1]
    short = msgspec.structs.replace(last, lengths=last.lengths[:2], tokens=last.tokens[: 4 * sum(last.lengths[:2])])
    count = 8 * sum(last.lengths[:2])
    cut = {
        name: (*getattr(message, name)[:2], Logprobs(group=2, values=getattr(message, name)[2].values[:count]))
        for name in ("rollout_logprobs", "reference_logprobs")
    }
    message = msgspec.structs.replace(
        message, responses=(*message.responses[:2], short), rewards=(*message.rewards[:2], floats(0, 1)), **cut
    )
    with pytest.raises(ProtocolError, match=r"groups of \[2, 3\] samples"):
        read(world, message)


def test_what_is_read_can_be_changed_without_touching_the_message(world: World, groups: list[Sampled]) -> None:
    message = world.train_message(KV, groups)
    unit = read(world, message)
    unit.rollout.zero_()
    unit.rewards[0][:] = 7.0
    assert torch.equal(read(world, message).advantages, unit.advantages)


@pytest.mark.parametrize("scale", list(Scale))
@pytest.mark.parametrize("reward", [0.0, 0.9, 1e8 + 0.1, -1 / 3])
def test_rewards_that_are_all_equal_move_no_bit_of_the_model(
    make_world: Callable[..., World], groups: list[Sampled], reward: float, scale: Scale
) -> None:
    """Four such numbers have another mean in floating point for some of these rewards."""
    algorithm = {"scale_rewards": scale, "beta": 0.0, "entropy_bonus": 0.0}
    world = make_world(algorithm=algorithm, optimizer={"weight_decay": 0.0})
    before = world.header.require(0).digest
    same = [
        Sampled(
            tokens=[*group.tokens, group.tokens[0]],
            rollout=[*group.rollout, group.rollout[0]],
            reference=[*group.reference, group.reference[0]],
            rewards=[reward] * 4,
        )
        for group in groups
    ]
    ref, state = world.prefix()
    message = world.train_message(ref, same)
    if scale is Scale.BATCH:
        message = msgspec.structs.replace(message, batch_rewards=floats(*[reward] * 12))
    world.send(message)
    world.clear_prefix_arena()
    world.prefix_backward(ref, state)
    assert not any(bool(gradient.any()) for gradient in (*world.gradients.values(), *world.prefix_gradients.values()))
    vote = prepare(world)
    assert vote.finite
    assert all(math.isfinite(value) for value in vote.metrics.values())
    assert vote.metrics["frac_reward_zero_std"] == 1.0
    assert vote.metrics["grad_norm"] == 0.0
    assert apply(world).digest == before
