"""Bounds over the checked data really bound every unit that can come of it, and not by much."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.config import Config
from rollplex.config.wire import eval_sampling, train_sampling
from rollplex.layout.shape import read_shape
from rollplex.protocol.common import Kind, Responses
from rollplex.protocol.prefix import Which
from rollplex_coordinator.decisions.plan import plan_step
from rollplex_coordinator.memory.bounds import _scratch
from rollplex_coordinator.memory.formulas import Formulas
from rollplex_coordinator.memory.leasing import Want
from rollplex_coordinator.memory.names import (
    PREFIX_BACKWARD,
    ROLLOUT_KV,
    SCORE_WORKSPACE,
    TRAIN_SCRATCH,
    TRAIN_WORKSPACE,
)
from rollplex_coordinator.memory.sizes import Sizes
from support.checked_rows import Drawn, Grid, checked, data_of, slot, uniform
from support.core import make_config
from support.workers import lay_out


def test_the_queries_of_one_call_are_those_of_the_prompt_with_the_longest_responses(
    model_folder: Path, tmp_path: Path
) -> None:
    config = make_config(
        model_folder,
        device={"kind": "cuda"},
        data={"prompts_per_iteration": 2},
        batching={"suffix_prompts": 2},
        rollout={"group_size": 2, "max_new_tokens": 9, "forced_lengths": [9, 9, 1, 1]},
    )
    formulas = Formulas(config=config, step=config, shape=read_shape(model_folder))
    found = _scratch(formulas, 1, 5, [], [[9, 9, 1, 1]])[TRAIN_SCRATCH]
    assert found == formulas.scratch(rows=1, tokens=20, longest=18)


SIDES = st.integers(1, 5).map(lambda n: 2 * n)
GRIDS = st.tuples(st.sampled_from([1, 1, 1, 2, 3]), SIDES, SIDES)
ROWS = st.lists(st.tuples(st.integers(1, 30), st.lists(GRIDS, max_size=3)), min_size=1, max_size=5)


@st.composite
def sections(draw: st.DrawFn) -> dict[str, Any]:
    """A configuration of some size."""
    prompts = draw(st.integers(1, 5))
    prefix = draw(st.integers(0, prompts))
    divisors = [n for n in range(1, (prefix or prompts) + 1) if (prefix or prompts) % n == 0]
    longest = draw(st.integers(1, 9))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float64"]))
    return {
        "run": {
            "share_prefix": draw(st.booleans()),
            "schedule": draw(st.sampled_from(["serial", "overlap", "stream"])),
        },
        "model": {
            "dtype": dtype,
            "freeze_vision": draw(st.booleans()),
        },
        "data": {"prompts_per_iteration": prompts},
        "rollout": {
            "group_size": draw(st.integers(2, 4)),
            "max_new_tokens": longest,
            "forced_lengths": draw(st.one_of(st.just([]), st.lists(st.integers(1, longest), min_size=1, max_size=3))),
        },
        "batching": {
            "decode_prompts": draw(st.integers(0, prompts)),
            "prefix_prompts": prefix,
            "suffix_prompts": draw(st.sampled_from(divisors)),
        },
        "device": {"kind": draw(st.sampled_from(["host"] if dtype == "float64" else ["host", "cuda"]))},
        "memory": {"prefix_activations": draw(st.sampled_from(["keep", "layers", "recompute", "recompute_layers"]))},
        "eval": [{"name": "held_out", "data": "other.jsonl"}],
    }


def responses_of(config: Config, groups: Sequence[int], draw: st.DataObject) -> tuple[Responses, ...]:
    """Responses of any length up to the longest; forced ones as they are forced."""
    size, forced = config.rollout.group_size, config.rollout.forced_lengths
    longest = config.rollout.max_new_tokens
    made = []
    for group in groups:
        if forced:
            lengths = tuple(forced[(group * size + s) % len(forced)] for s in range(size))
        else:
            lengths = tuple(draw.draw(st.lists(st.integers(1, longest), min_size=size, max_size=size)))
        made.append(Responses(group=group, lengths=lengths, tokens=b""))
    return tuple(made)


@settings(max_examples=150, deadline=None)
@given(given_sections=sections(), train=ROWS, held_out=ROWS, draw=st.data())
def test_no_unit_of_any_step_is_larger_than_its_bound(
    model_folder: Path, given_sections: dict[str, Any], train: list[Drawn], held_out: list[Drawn], draw: st.DataObject
) -> None:
    config = make_config(model_folder, **given_sections)
    sizes = Sizes(config)
    bounds = sizes.bounds(data_of(checked(train, "train"), checked(held_out, "held_out")))
    largest = dict.fromkeys(bounds, 0)

    def note(name: str, *wants: Want) -> None:
        largest[name] = max(largest[name], sum(want.size_bytes for want in wants))

    count = config.data.prompts_per_iteration
    slots = [slot(group, draw.draw(st.sampled_from(train))) for group in range(count)]
    tests = [slot(group, draw.draw(st.sampled_from(held_out))) for group in range(count)]
    plan = plan_step(
        count,
        decode_prompts=config.decode_prompts,
        prefix_prompts=config.prefix_prompts,
        suffix_prompts=config.suffix_prompts,
    )
    for unit in plan.decode:
        note(ROLLOUT_KV, sizes.wants.rollout_kv([slots[g] for g in unit], train_sampling(config, stop_ids=()), 0))
    note(ROLLOUT_KV, sizes.wants.rollout_kv(tests, eval_sampling(config, "held_out", stop_ids=()), 0))
    for prefix in plan.prefix:
        prompts = [slots[g] for g in prefix.groups]
        for which in Which:
            for want in sizes.wants.prefix_unit(which, prompts, 0):
                note(want.kind, want)
        if (backward := sizes.wants.backward_workspace(prompts, 0)) is not None:
            note(PREFIX_BACKWARD, backward)
        for index in prefix.suffix:
            responses = responses_of(config, plan.suffix[index].groups, draw)
            note(SCORE_WORKSPACE, sizes.wants.score_workspace(responses, 0))
            note(TRAIN_WORKSPACE, *sizes.wants.train_workspace(prompts, responses, 0))
    for some in (slots, tests):
        largest[Kind.INPUTS] = max(largest[Kind.INPUTS], lay_out(some)[1])
    for name, size_bytes in largest.items():
        assert size_bytes <= bounds[name], name


@pytest.mark.parametrize("share_prefix", [True, False], ids=["shared", "replicated"])
def test_bounds_are_not_much_larger_than_the_largest_unit(model_folder: Path, share_prefix: bool) -> None:
    config = make_config(model_folder, run={"share_prefix": share_prefix})
    sizes = Sizes(config)
    slots, data = uniform(config, 60, 80)
    bounds = sizes.bounds(data)
    full = tuple(Responses(group=g, lengths=(6, 6, 6), tokens=b"") for g in range(4))
    exact = {
        ROLLOUT_KV: sizes.wants.rollout_kv(slots, train_sampling(config, stop_ids=()), 0).size_bytes,
        SCORE_WORKSPACE: sizes.wants.score_workspace(full, 0).size_bytes,
        TRAIN_WORKSPACE: sum(want.size_bytes for want in sizes.wants.train_workspace(slots, full, 0)),
    }
    for which in Which:
        exact |= {want.kind: want.size_bytes for want in sizes.wants.prefix_unit(which, slots, 0)}
    for name, size_bytes in exact.items():
        assert size_bytes <= bounds[name] <= 1.1 * size_bytes, name


@pytest.mark.parametrize("odd", [[(1, 2, 2)] * 2, [(1, 4, 2)], [(2, 2, 2)]], ids=str)
@pytest.mark.parametrize("media_rows", [4, 8, 12, 16, 20, 32, 64])
def test_one_prompt_whose_media_have_another_size_is_bounded(
    model_folder: Path, media_rows: int, odd: list[Grid]
) -> None:
    """Sequences of unequal length cost the vision tower a copy of every patch."""
    config = make_config(model_folder, data={"prompts_per_iteration": 64})
    sizes = Sizes(config)
    usual: Drawn = (1, [(1, 2, media_rows // 2)])
    kinds = [usual] * 63 + [(1, odd)]
    bound = sizes.bounds(data_of(checked(kinds, "train")))[Kind.PREFIX_ACTIVATIONS]
    unit = [slot(group, row) for group, row in enumerate(kinds)]
    assert sizes.wants.prefix_unit(Which.ACTOR, unit, 0)[0].size_bytes <= bound


@pytest.mark.parametrize("shorter", [0, 1, 3])
def test_a_unit_with_one_response_that_is_a_little_shorter_is_bounded(model_folder: Path, shorter: int) -> None:
    """Unequal lengths cost masks, which weigh more than the missing tokens."""
    config = make_config(model_folder, rollout={"group_size": 4, "max_new_tokens": 9})
    sizes = Sizes(config)
    slots, data = uniform(config, 20, 8)
    lengths = [(9, 9, 9, 9)] * 3 + [(9, 9, 9, 9 - shorter)]
    responses = tuple(Responses(group=g, lengths=each, tokens=b"") for g, each in enumerate(lengths))
    size_bytes = sum(want.size_bytes for want in sizes.wants.train_workspace(slots, responses, 0))
    assert size_bytes <= sizes.bounds(data)[TRAIN_WORKSPACE]
