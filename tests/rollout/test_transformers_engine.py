"""The transformers engine on a tiny random model over a host segment, against stock transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rollplex.errors import EngineError
from rollplex_rollout.engine import FinishedGroup, Unit
from rollplex_rollout.transformers_engine import TransformersEngine
from support.tiny import NEVER_SAMPLED, VOCAB

if TYPE_CHECKING:
    from rollout.conftest import Node, Run

Generate = Callable[[Unit], "Run"]


@contextmanager
def counting(module: Any, count: Callable[[Any, Any], None]) -> Iterator[None]:
    """Calls `count(args, kwargs)` before each forward of the module."""
    handle = module.register_forward_pre_hook(lambda _, args, kwargs: count(args, kwargs), with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def expected_logprobs(node: Node, group: int, response: list[int], temperature: float) -> Any:
    """By an independent route: renormalised softmax over the allowed ids, float64."""
    logits = node.full_logits(group, response).double() / temperature
    keep = [token for token in range(VOCAB) if token not in NEVER_SAMPLED]
    allowed = torch.log_softmax(logits[:, keep], dim=-1)
    return torch.stack([allowed[n, keep.index(token)] for n, token in enumerate(response)]).numpy()


@pytest.mark.parametrize(
    ("asked", "reported"),
    [({}, 1.0), ({"temperature": 0.7}, 0.7), ({"temperature": 1.3, "top_p": 0.7, "top_k": 20}, 1.3)],
)
def test_logprobs_equal_an_unsplit_forward_of_stock_transformers(
    shared_node: Node, generate: Generate, asked: dict[str, Any], reported: float
) -> None:
    run = generate(shared_node.unit(**asked))
    for group in range(4):
        for response, logprobs in zip(run.responses(group), run.logprobs(group), strict=True):
            expected = expected_logprobs(shared_node, group, response, reported)
            assert float(np.abs(logprobs - expected).max()) < 1e-4
            assert logprobs.dtype == np.float64


def test_greedy_takes_the_best_allowed_token_and_reports_temperature_one(shared_node: Node, generate: Generate) -> None:
    run = generate(shared_node.unit(temperature=0.0, group_size=1))
    for group in range(4):
        response = run.responses(group)[0]
        logits = shared_node.full_logits(group, response)
        logits[:, list(NEVER_SAMPLED)] = -torch.inf
        assert response == logits.argmax(-1).tolist()
        expected = expected_logprobs(shared_node, group, response, 1.0)
        assert float(np.abs(run.logprobs(group)[0] - expected).max()) < 1e-4


def test_groups_are_announced_in_the_step_in_which_their_last_sample_stops(
    shared_node: Node, engine: TransformersEngine
) -> None:
    steps, seen = [0], []

    def forward(*_: Any) -> None:
        steps[0] += 1

    def announce(group: FinishedGroup) -> None:
        seen.append((group.group, steps[0]))

    lengths = (2, 5, 1, 7, 7, 3, 1, 1, 1, 4, 4, 2)  # groups of three: 5, 7, 1, 4
    with counting(engine._model.lm_head, forward):
        report = engine.generate(shared_node.unit(forced_lengths=lengths), announce)
    assert seen == [(2, 1), (3, 4), (0, 5), (1, 7)]
    assert (steps[0], report.decode_steps) == (7, 6)


def test_a_response_ends_with_its_stop_id_and_has_none_before(shared_node: Node, generate: Generate) -> None:
    stop_ids = tuple(range(0, 64, 4))
    run = generate(shared_node.unit(stop_ids=stop_ids, group_size=6))
    kinds = set()
    for group in range(4):
        finished = run.by_group[group]
        for response, stopped in zip(run.responses(group), finished.stopped, strict=True):
            assert not set(response[:-1]) & set(stop_ids)
            assert stopped == (response[-1] in stop_ids)
            assert stopped or len(response) == 8
            kinds.add((stopped, len(response) < 8))
    assert {(True, True), (False, False)} <= kinds


def test_two_runs_and_two_engines_give_the_same_bits(
    shared_node: Node, engine: TransformersEngine, run_with: Callable[[TransformersEngine, Unit], Run]
) -> None:
    unit = shared_node.unit(temperature=0.9, top_p=0.95, stop_ids=(3, 4, 5))
    first, second = run_with(engine, unit), run_with(engine, unit)
    third = run_with(TransformersEngine(shared_node.setup), unit)
    for other in (second, third):
        assert [group.group for group in first.groups] == [group.group for group in other.groups]
        for mine, theirs in zip(first.groups, other.groups, strict=True):
            assert (mine.lengths, mine.stopped) == (theirs.lengths, theirs.stopped)
            assert mine.tokens.tobytes() == theirs.tokens.tobytes()
            assert mine.logprobs.tobytes() == theirs.logprobs.tobytes()


def test_a_prompts_draws_do_not_depend_on_its_unit_or_on_the_group_size(shared_node: Node, generate: Generate) -> None:
    whole = generate(shared_node.unit())
    alone = generate(shared_node.unit((2,), group_size=2))
    other_order = generate(shared_node.unit((3, 2)))
    assert alone.responses(2) == whole.responses(2)[:2]
    assert other_order.responses(2) == whole.responses(2)
    assert len({tuple(response) for group in range(4) for response in whole.responses(group)}) == 12


def test_the_dataset_row_and_not_the_group_decides_a_prompts_draws(shared_node: Node, generate: Generate) -> None:
    unit, slot = shared_node.unit(), shared_node.slots[1]
    twin, stranger = replace(slot, group=8), replace(slot, group=9, row=slot.row + 1)
    run = generate(dataclasses.replace(unit, prompts=(slot, twin, stranger)))
    assert run.responses(8) == run.responses(1)
    assert run.responses(9) != run.responses(1)


@pytest.mark.parametrize("change", [{"seed": 4}, {"purpose": "eval:x"}, {"step": 3}])
def test_seed_purpose_and_step_change_the_draws(shared_node: Node, generate: Generate, change: dict[str, Any]) -> None:
    assert generate(shared_node.unit()).responses(1) != generate(shared_node.unit(**change)).responses(1)


def test_each_position_of_a_response_has_its_own_draw(shared_node: Node, generate: Generate) -> None:
    run = generate(shared_node.unit(temperature=100.0, group_size=16))  # nearly uniform: one draw, one token
    different = [len(set(response)) for group in range(4) for response in run.responses(group)]
    assert sum(different) / len(different) > 6.9  # of 8; expected 7.6


@pytest.mark.parametrize("group_size", [1, 5])
def test_the_vision_tower_sees_each_prompts_media_once_whatever_the_group_size(
    shared_node: Node, engine: TransformersEngine, group_size: int
) -> None:
    grids: list[list[int]] = []
    with counting(engine._model.model.visual, lambda _, kwargs: grids.extend(kwargs["grid_thw"].tolist())):
        report = engine.generate(shared_node.unit(group_size=group_size), lambda _: None)
        assert grids == [[1, 4, 4], [1, 2, 2], [1, 2, 4], [2, 2, 4]]
        assert report.vision_prompts == 3
        assert engine.generate(shared_node.unit((1,)), lambda _: None).vision_prompts == 0
        assert len(grids) == 4


def test_predicted_and_held_kv_are_equal_and_the_prompts_share_is_not_repeated(
    shared_node: Node, engine: TransformersEngine
) -> None:
    cases: list[dict[str, Any]] = [{}, {"group_size": 9}, {"max_new_tokens": 1}, {"forced_lengths": (2, 3)}]
    for changes in cases:
        unit = shared_node.unit(**changes)
        assert engine.generate(unit, lambda _: None).kv_bytes == engine.kv_bytes(unit)
    few, many = (shared_node.unit(group_size=size, max_new_tokens=1) for size in (1, 8))
    assert engine.kv_bytes(few) == engine.kv_bytes(many)


def test_a_response_of_one_token_needs_no_decode_step(shared_node: Node, generate: Generate) -> None:
    run = generate(shared_node.unit(max_new_tokens=1))
    assert run.report.decode_steps == 0
    assert all(group.lengths == (1, 1, 1) for group in run.groups)


def test_ids_never_sampled_do_not_appear_at_temperature_100(shared_node: Node, generate: Generate) -> None:
    run = generate(shared_node.unit(temperature=100.0, group_size=64))
    tokens = {token for group in range(4) for response in run.responses(group) for token in response}
    assert len(tokens) > 60
    assert not tokens & set(NEVER_SAMPLED)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_never_sampled_change_no_bit_even_where_their_logits_are_the_largest(
    node: Node, run_with: Callable[[TransformersEngine, Unit], Run], temperature: float
) -> None:
    engine, unit = TransformersEngine(node.setup), node.unit(temperature=temperature)
    before = run_with(engine, unit)
    rows = node.parameter("lm_head.weight")
    rows[64] = 1e3
    rows[65] = -1e3  # of the image and the video placeholder, one has the largest logit, whatever the hidden state
    largest: list[int] = []
    hook = engine._model.lm_head.register_forward_hook(lambda *call: largest.extend(call[2].argmax(-1).flatten()))
    after = run_with(engine, unit)
    hook.remove()
    assert {int(token) for token in largest} <= {64, 65}
    for group in range(4):
        assert after.responses(group) == before.responses(group)
        assert after.by_group[group].logprobs.tobytes() == before.by_group[group].logprobs.tobytes()


def test_a_padding_id_that_is_the_only_end_is_drawn_and_scored_like_any_other(
    shared_node: Node, run_with: Callable[[TransformersEngine, Unit], Run]
) -> None:
    pad, never = 69, (64, 65, 66, 67)
    spec = replace(shared_node.spec, never_sampled=never)
    engine = TransformersEngine(dataclasses.replace(shared_node.setup, spec=spec))
    run = run_with(engine, shared_node.unit(temperature=100.0, group_size=64, stop_ids=(pad,)))
    stopped = 0
    for group in range(4):
        assert run.by_group[group].stopped == tuple(response[-1] == pad for response in run.responses(group))
        for response, logprobs in zip(run.responses(group), run.logprobs(group), strict=True):
            assert pad not in response[:-1]
            stopped += response[-1] == pad
            if response[-1] == pad:
                logits = shared_node.full_logits(group, response).double() / 100.0
                logits[:, list(never)] = -torch.inf
                expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]
                assert float(np.abs(logprobs - expected.numpy()).max()) < 1e-4
    assert 10 < stopped < 100  # of 256; expected 28


def test_the_engine_samples_from_the_mapped_bytes(
    node: Node, run_with: Callable[[TransformersEngine, Unit], Run]
) -> None:
    engine, unit = TransformersEngine(node.setup), node.unit(temperature=0.0)
    before = run_with(engine, unit)
    node.parameter("model.norm.weight").mul_(0.5)
    engine.drop_caches()
    after = run_with(engine, unit)
    assert engine.on_policy
    assert not np.array_equal(before.by_group[0].logprobs, after.by_group[0].logprobs)


def test_weights_that_make_nan_are_an_error_and_not_tokens(node: Node) -> None:
    engine = TransformersEngine(node.setup)
    node.parameter("model.norm.weight")[0] = torch.nan
    with pytest.raises(EngineError, match="logits are not finite"):
        engine.generate(node.unit(), lambda _: None)


def test_an_error_of_the_callback_comes_out_and_the_engine_goes_on_working(
    shared_node: Node, engine: TransformersEngine, generate: Generate
) -> None:
    def refuse(_: FinishedGroup) -> None:
        raise KeyError("callback")

    with pytest.raises(KeyError, match="callback"):
        engine.generate(shared_node.unit(), refuse)
    assert len(generate(shared_node.unit()).groups) == 4


def test_nothing_looks_at_the_inputs_or_the_weights_afterwards(node: Node) -> None:
    engine = TransformersEngine(node.setup)
    engine.generate(node.unit(), lambda _: None)
    node.inputs.close()
    engine.close()
    node.actor.close()
