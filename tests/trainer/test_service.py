"""The trainer service in one process: gradients, the update, what may not happen."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from torch import Tensor, autograd
from transformers import Qwen2_5_VLForConditionalGeneration

from rollplex.errors import ModelError, ProtocolError, StaleWeightsError, StateError, UpdateError
from rollplex.layout.parameters import gradient_table
from rollplex.memory.digest import digest
from rollplex.memory.header import State
from rollplex.memory.predict import logits_bytes, scored_rows, suffix_saved_bytes
from rollplex.memory.tensors import hf_views, optimizer_views, padding, views
from rollplex.protocol.common import DigestRequest
from rollplex.protocol.trainer import GradientsKept, KeepGradients, Loss, PrepareUpdate, Publish, Scale, SkipUpdate
from rollplex_trainer.service import TrainerService
from support.tiny import Prompt
from support.trainer import Sampled, World, apply, prepare, train_all

MakeWorld = Callable[..., World]

RECENT = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 17)
"""Older releases keep cos and sin per layer, a few per cent more than predicted."""


def by_hf_name(world: World, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    return hf_views(stored, gradient_table(world.table))


def assert_close(got: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float) -> None:
    """max |a - b| / max(max |b|, 1e-3 of the largest gradient of the model), per parameter."""
    floor = 1e-3 * max(float(value.abs().max()) for value in truth.values())
    assert set(got) == set(truth)
    for name, value in truth.items():
        scale = max(float(value.abs().max()), floor)
        assert float((got[name] - value).abs().max()) / scale < tolerance, name


class Unsplit:
    """transformers' own model on whole sequences, one at a time, with the loss written out for on-policy samples."""

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        self.world = world
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            world.folder, dtype=dtype, attn_implementation="eager"
        )
        if world.load.model.freeze_vision:
            self.model.model.visual.requires_grad_(requires_grad=False)

    def sequence(self, prompt: Prompt, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [R] of a response."""
        response = torch.tensor(tokens)
        ahead = torch.arange(len(tokens)) + prompt.slot.next_position
        logits = self.model(
            input_ids=torch.cat([prompt.ids, response])[None],
            position_ids=torch.cat([prompt.positions, ahead.expand(3, -1)], 1)[:, None],
            mm_token_type_ids=torch.cat([prompt.kinds, torch.zeros_like(response).int()])[None],
            pixel_values=prompt.pixels,
            image_grid_thw=prompt.grids,
            use_cache=False,
        ).logits[0, len(prompt.ids) - 1 : -1]
        allowed = [i for i in range(logits.shape[-1]) if i not in self.world.load.model.never_sampled]
        logprobs = torch.log_softmax(logits[:, allowed] / self.world.algorithm.temperature, -1)
        index = torch.tensor([allowed.index(token) for token in tokens])
        return logprobs[torch.arange(len(tokens)), index], -(logprobs.exp() * logprobs).sum(-1)

    def loss(self, groups: list[Sampled], advantages: list[list[float]]) -> Tensor:
        rules = self.world.algorithm
        total = torch.zeros((), dtype=self.model.dtype)
        sequences = [
            (p, g, a, i) for p, g, a in zip(self.world.prompts, groups, advantages, strict=True) for i in range(3)
        ]
        for prompt, group, group_advantages, i in sequences:
            logprobs, entropy = self.sequence(prompt, group.tokens[i])
            difference = torch.tensor(group.reference[i], dtype=logprobs.dtype) - logprobs
            extra = rules.beta * (difference.exp() - difference - 1) - rules.entropy_bonus * entropy
            ratio = (logprobs - logprobs.detach()).exp()
            match rules.loss:
                case Loss.GRPO:
                    total = total + (extra - ratio * group_advantages[i]).mean() / len(sequences)
                case Loss.DAPO:
                    tokens = sum(len(t) for g in groups for t in g.tokens)
                    total = total + (extra - ratio * group_advantages[i]).sum() / tokens
                case _:
                    pytest.fail("not written out")
        return total

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        autograd.backward(loss)
        return {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}


def scaled_advantages(groups: list[Sampled]) -> list[list[float]]:
    out = []
    for group in groups:
        mean = sum(group.rewards) / 3
        spread = math.sqrt(sum((r - mean) ** 2 for r in group.rewards) / 2)
        out.append([(r - mean) / (spread + 1e-4) for r in group.rewards])
    return out


def test_loading_fills_the_weights_copies_the_reference_and_publishes_version_0(make_world: MakeWorld) -> None:
    world = make_world()
    header = world.header.require(0)
    assert header.digest == digest(world.segments.map_again(world.load.actor), world.table)
    stored = Qwen2_5_VLForConditionalGeneration.from_pretrained(world.folder, dtype=torch.float32).state_dict()
    for name, value in hf_views(world.weights, world.table).items():
        assert torch.equal(value, stored[name]), name
    assert world.load.reference is not None
    reference = views(world.segments.map_again(world.load.reference), gradient_table(world.table))
    for name, value in reference.items():
        assert torch.equal(value, world.weights[name]), name
    assert not any(bool(gradient.any()) for gradient in world.gradients.values())
    reply = world.send(DigestRequest(cause=5))
    assert (reply.version, reply.digest) == (0, header.digest)


def test_another_parameter_table_is_refused(make_world: MakeWorld) -> None:
    world = make_world()
    spec = msgspec.structs.replace(world.load.model, table_hash="0" * 64)
    service = TrainerService(world.segments)
    with pytest.raises(ModelError, match="parameter table"):
        service.handle(msgspec.structs.replace(world.load, model=spec), lambda _: None)


def test_nothing_works_before_loading_and_loading_works_once(make_world: MakeWorld) -> None:
    world = make_world()
    with pytest.raises(StateError, match="LoadTrainer first"):
        TrainerService(world.segments).handle(PrepareUpdate(cause=1, step=0, version=0), lambda _: None)
    with pytest.raises(StateError, match="second LoadTrainer"):
        world.send(world.load)


@pytest.mark.parametrize(
    ("loss", "split", "copies", "freeze"),
    [
        (Loss.GRPO, (3,), 1, False),
        (Loss.DAPO, (1, 2), 1, False),
        (Loss.GRPO, (2, 1), 3, False),
        (Loss.DAPO, (1, 1, 1), 1, True),
    ],
    ids=["one-unit", "two-units", "replicated", "frozen-vision"],
)
def test_gradients_are_those_of_an_unsplit_forward_and_backward(
    make_world: MakeWorld, groups: list[Sampled], loss: Loss, split: tuple[int, ...], copies: int, freeze: bool
) -> None:
    world = make_world("float64", freeze_vision=freeze, algorithm={"loss": loss}, optimizer={"max_grad_norm": 0.0})
    train_all(world, groups, split, copies)
    vote = prepare(world)
    unsplit = Unsplit(world, torch.float64)
    value = unsplit.loss(groups, scaled_advantages(groups))
    truth = unsplit.gradients(value)
    got = by_hf_name(world, world.gradients)
    assert_close(got, truth, 1e-6)
    assert vote.finite
    assert vote.metrics["loss"] == pytest.approx(value.item(), abs=1e-7)
    norm = math.sqrt(sum(float(g.square().sum()) for g in truth.values()))
    assert vote.metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)


def test_float32_gradients_agree_with_the_unsplit_model(make_world: MakeWorld, groups: list[Sampled]) -> None:
    world = make_world(optimizer={"max_grad_norm": 0.0})
    train_all(world, groups)
    prepare(world)
    unsplit = Unsplit(world, torch.float32)
    truth = unsplit.gradients(unsplit.loss(groups, scaled_advantages(groups)))
    assert_close(by_hf_name(world, world.gradients), truth, 1e-5)


def test_the_arena_stays_where_it_is_over_steps(make_world: MakeWorld, groups: list[Sampled]) -> None:
    world = make_world()
    model = world.service._ready.model
    first = {name: p.grad.data_ptr() for name, p in model.named_parameters() if p.grad is not None}
    assert len(first) == len(by_hf_name(world, world.gradients))
    for version in range(3):
        train_all(world, groups, version=version)
        assert all(bool(g.any()) for n, g in world.gradients.items() if n.startswith("model.layers"))
        prepare(world, version)
        apply(world, version)
        assert {n: p.grad.data_ptr() for n, p in model.named_parameters() if p.grad is not None} == first
        assert not any(bool(g.any()) for g in world.gradients.values())


def test_an_update_steps_in_place_between_updating_and_the_next_stable_version(
    make_world: MakeWorld, groups: list[Sampled], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    before = {name: value.clone() for name, value in world.weights.items()}
    train_all(world, groups)
    vote = prepare(world)
    assert all(torch.equal(before[name], value) for name, value in world.weights.items())
    ordinary = {n: torch.nn.Parameter(before[n].clone()) for n in world.gradients}
    for name, parameter in ordinary.items():
        parameter.grad = world.gradients[name].clone()
    assert vote.metrics["grad_norm"] > 1.0
    total = math.sqrt(sum(float(g.double().square().sum()) for g in world.gradients.values()))
    assert total == pytest.approx(1.0, rel=1e-5), "clipped"

    optimizer = world.service._ready.optimizer
    seen = []
    step = optimizer.step

    def watched(rate: float) -> None:
        seen.append((world.header.read().state, world.header.read().version))
        step(rate)
        seen.append((world.header.read().state, world.header.read().version))

    monkeypatch.setattr(optimizer, "step", watched)
    reply = apply(world)
    assert seen == [(State.UPDATING, 0)] * 2
    header = world.header.require(1)
    assert reply.version == 1
    assert reply.digest == header.digest == digest(world.segments.map_again(world.load.actor), world.table)
    decay = {entry.name: entry.decay for entry in world.table.entries}
    stock = torch.optim.AdamW(
        [
            {"params": [p for n, p in ordinary.items() if decay[n]], "weight_decay": 0.1},
            {"params": [p for n, p in ordinary.items() if not decay[n]], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
        fused=True,
    )
    stock.step()
    for name, parameter in ordinary.items():
        assert torch.equal(world.weights[name], parameter), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_that_was_voted_on_is_kept_as_it_lies_in_the_arena(
    make_world: MakeWorld, groups: list[Sampled], tmp_path: Path, dtype: str
) -> None:
    world = make_world(dtype)
    train_all(world, groups)
    file = tmp_path / "gradients" / "step_0.bin"
    early = KeepGradients(cause=8, step=0, file=str(file))
    with pytest.raises(StateError, match="cannot keep the gradients now"):
        world.send(early)
    prepare(world)
    reply = world.send(KeepGradients(cause=9, step=0, file=str(file)))
    table = gradient_table(world.table)
    assert reply == GradientsKept(cause=9, step=0, size_bytes=table.total_bytes)
    content = torch.frombuffer(bytearray(file.read_bytes()), dtype=getattr(torch, dtype))
    assert torch.equal(content, world.service._ready.arena)
    for entry in table.entries:
        first = entry.offset // table.item_bytes
        part = content[first : first + entry.size_bytes // table.item_bytes].view(entry.shape)
        assert torch.equal(part, world.gradients[entry.name]), entry.name
    assert [one.name for one in file.parent.iterdir()] == ["step_0.bin"]
    apply(world)


def test_gradients_that_cannot_be_written_are_named(
    make_world: MakeWorld, groups: list[Sampled], tmp_path: Path
) -> None:
    world = make_world()
    train_all(world, groups)
    prepare(world)
    (tmp_path / "gradients").write_text("a file where a folder should be")
    with pytest.raises(UpdateError, match=r"cannot be kept.*run\.keep_gradients"):
        world.send(KeepGradients(cause=9, step=0, file=str(tmp_path / "gradients" / "step_0.bin")))


def test_bfloat16_weights_are_the_rounded_master(make_world: MakeWorld, groups: list[Sampled]) -> None:
    world = make_world("bfloat16")
    ready: Any = world.service._ready
    state = ready._state
    for name, master in state.states["master"].items():
        assert torch.equal(master, world.weights[name].float())
    for version in range(2):
        train_all(world, groups, version=version)
        assert prepare(world, version).finite
        apply(world, version)
    mapped = optimizer_views(world.segments.map_again(world.load.optimizer_state), ready._state_table)
    for name, master in mapped.states["master"].items():
        assert torch.equal(world.weights[name], master.bfloat16())
    assert int(mapped.step) == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_fails_the_vote_and_skipping_leaves_the_weights(
    make_world: MakeWorld, groups: list[Sampled], bad: float
) -> None:
    world, clean = make_world(), make_world()
    before = world.header.require(0).digest
    train_all(world, groups)
    next(iter(world.prefix_gradients.values())).view(-1)[3] = bad
    vote = prepare(world)
    assert not vote.finite
    assert "grad_norm" not in vote.metrics
    assert vote.metrics["reward"] == pytest.approx(4.75 / 9)
    with pytest.raises(StateError, match="apply the update"):
        apply(world)
    world.send(SkipUpdate(cause=92, step=0))
    assert world.header.require(0).digest == before
    assert world.send(DigestRequest(cause=93)).digest == before
    for each in (world, clean):
        train_all(each, groups)
        assert prepare(each).finite
    assert apply(world).digest == apply(clean).digest, "nothing of the dropped step is left"


def test_weights_that_become_infinite_are_poisoned_and_named(make_world: MakeWorld, groups: list[Sampled]) -> None:
    world = make_world(optimizer={"name": "sgd", "lr": 1e38, "max_grad_norm": 0.0})
    train_all(world, groups)
    assert prepare(world).finite
    next(iter(world.gradients.values()))[0] = 1e30
    with pytest.raises(UpdateError, match="not finite"):
        apply(world)
    assert world.header.read().state is State.POISONED
    with pytest.raises(StaleWeightsError):
        world.send(PrepareUpdate(cause=1, step=0, version=0))


def test_an_error_inside_the_step_poisons_the_weights(
    make_world: MakeWorld, groups: list[Sampled], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    train_all(world, groups)
    prepare(world)

    def fail(rate: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(world.service._ready.optimizer, "step", fail)
    with pytest.raises(KeyboardInterrupt):
        apply(world)
    assert world.header.read().state is State.POISONED


def test_a_group_without_rewards_changes_nothing_but_its_count(make_world: MakeWorld, groups: list[Sampled]) -> None:
    without, world = make_world(), make_world()
    skipped = [groups[0], replace(groups[1], rewards=[math.nan] * 3), groups[2]]
    train_all(world, skipped, (1, 1, 1))
    ref, state = without.prefix()
    without.send(without.train_message(ref, groups[:1], release=False))
    without.send(without.train_message(ref, groups[2:], start=2, unit=2, first=False))
    without.clear_prefix_arena()
    without.prefix_backward(ref, state)
    one, other = prepare(world), prepare(without)
    assert one.metrics["groups_skipped"] == 1
    assert one.metrics["loss_normaliser"] == other.metrics["loss_normaliser"] == 6
    for name in ("loss", "kl", "entropy", "reward", "reward_std", "grad_norm"):
        assert one.metrics[name] == pytest.approx(other.metrics[name], rel=1e-6), name
    assert_close(by_hf_name(world, world.gradients), by_hf_name(without, without.gradients), 1e-6)


def test_a_step_without_any_reward_is_refused_and_can_be_skipped(make_world: MakeWorld, groups: list[Sampled]) -> None:
    world = make_world()
    train_all(world, [replace(g, rewards=[math.nan] * 3) for g in groups])
    vote = prepare(world)
    assert not vote.finite
    assert vote.metrics["groups_skipped"] == 3
    assert "reward" not in vote.metrics
    world.send(SkipUpdate(cause=92, step=0))
    world.header.require(0)


def test_releasing_unmaps_the_segment_at_once(
    make_world: MakeWorld, groups: list[Sampled], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    ref, _ = world.prefix()
    world.send(world.train_message(ref, groups[:2], release=False))
    assert ref.segment in world.segments.attached
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("a reference cycle kept the segment alive"))
    world.send(world.train_message(ref, groups[2:], start=2, unit=1, first=False))
    assert ref.segment not in world.segments.attached


def test_wrong_versions_steps_and_orders_are_refused(make_world: MakeWorld, groups: list[Sampled]) -> None:
    world = make_world()
    ref, _ = world.prefix()
    message = world.train_message(ref, groups, unit=4, release=False)
    with pytest.raises(StaleWeightsError, match="version 0"):
        world.send(msgspec.structs.replace(message, version=1))
    with pytest.raises(StateError, match="no gradients"):
        apply(world)
    world.send(message)
    for unit in (3, 4):
        with pytest.raises(StateError, match="order of their ids"):
            world.send(msgspec.structs.replace(message, suffix_unit=unit))
    with pytest.raises(StateError, match="another step"):
        world.send(msgspec.structs.replace(message, step=1, suffix_unit=5))
    with pytest.raises(StateError, match="apply the update"):
        apply(world)
    with pytest.raises(StateError, match="skip the update"):
        world.send(SkipUpdate(cause=1, step=0))
    prepare(world)
    with pytest.raises(StateError, match="train suffix unit"):
        world.send(msgspec.structs.replace(message, suffix_unit=5))
    with pytest.raises(StateError, match="prepare the update"):
        prepare(world)
    with pytest.raises(StateError, match="another step"):
        world.send(SkipUpdate(cause=1, step=7))


def test_an_accepted_step_can_still_be_skipped(make_world: MakeWorld, groups: list[Sampled]) -> None:
    world = make_world()
    train_all(world, groups)
    prepare(world)
    world.send(SkipUpdate(cause=92, step=0))
    assert not any(bool(g.any()) for g in world.gradients.values())
    world.header.require(0)


def test_batch_scaling_uses_the_rewards_of_the_whole_step(make_world: MakeWorld, groups: list[Sampled]) -> None:
    world = make_world(algorithm={"scale_rewards": Scale.BATCH})
    ref, _ = world.prefix()
    message = world.train_message(ref, groups[:1])
    with pytest.raises(ProtocolError, match="whole step"):
        world.send(message)
    blob = torch.tensor([r for g in groups for r in g.rewards], dtype=torch.float64).numpy().tobytes()
    world.send(msgspec.structs.replace(message, batch_rewards=blob))


def test_held_memory_is_what_shapes_predict_and_names_the_lease(make_world: MakeWorld, groups: list[Sampled]) -> None:
    world = make_world()
    ref, _ = world.prefix()
    for unit, start, stop in ((0, 0, 1), (1, 1, 3)):
        part = groups[start:stop]
        message = world.train_message(ref, part, start=start, unit=unit, first=unit == 0, release=unit == 1)
        held, scratch = world.send(message).held
        lengths = [len(tokens) for group in part for tokens in group.tokens]
        predicted = suffix_saved_bytes(
            world.shape,
            prompts=len(part),
            prefix_tokens=max(prompt.slot.tokens for prompt in world.prompts),
            lengths=lengths,
            entropy=True,
            dtype="float32",
        )
        assert (held.lease, scratch.lease) == (7, 8)
        assert held.size_bytes == pytest.approx(predicted, rel=0.02 if RECENT else 0.05)
        rows = scored_rows(len(part), lengths)
        assert scratch.size_bytes == pytest.approx(logits_bytes(world.shape, rows=rows, dtype="float32"), rel=0.02)


def test_the_same_step_twice_gives_the_same_bits(make_world: MakeWorld, groups: list[Sampled]) -> None:
    votes, digests = [], []
    for _ in range(2):
        world = make_world()
        train_all(world, groups, (1, 2))
        vote = prepare(world)
        votes.append((vote.finite, vote.metrics))
        digests.append(apply(world).digest)
    assert votes[0] == votes[1]
    assert digests[0] == digests[1]


def test_padding_and_alignment_gaps_stay_0(make_world: MakeWorld, groups: list[Sampled]) -> None:
    world = make_world()
    train_all(world, groups)
    prepare(world)
    apply(world)
    assert not any(bool(gap.any()) for gaps in padding(world.weights, world.table).values() for gap in gaps)
    mapping = world.segments.map_again(world.load.actor)
    ends = [entry.offset + entry.size_bytes for entry in world.table.entries]
    starts = [*(entry.offset for entry in world.table.entries[1:]), world.table.total_bytes]
    gaps = list(zip(ends, starts, strict=True))
    assert any(start > end for end, start in gaps)
    assert not any(any(mapping.read(end, start - end)) for end, start in gaps)


def test_a_trainer_that_is_alone_publishes_by_itself(make_world: MakeWorld) -> None:
    with pytest.raises(StateError, match="Publish to a trainer that is alone"):
        make_world().send(Publish(cause=1, version=0))
