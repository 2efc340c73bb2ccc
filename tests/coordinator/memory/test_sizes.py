"""Sizes from shapes: bounds over the data really bound every unit that can come of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rollplex.config import Config
from rollplex.config.wire import eval_sampling, train_sampling
from rollplex.journal.phases import Phase
from rollplex.layout.kv import KvLayout
from rollplex.layout.optimizer import optimizer_table
from rollplex.layout.parameters import gradient_table, reference_table
from rollplex.protocol.common import Kind, MediaSlot, PromptSlot, Responses, Role
from rollplex.protocol.inputs import DataChecked, SourceChecked
from rollplex.protocol.prefix import Which
from rollplex_coordinator.decisions.plan import plan_step
from rollplex_coordinator.memory.leasing import Want
from rollplex_coordinator.memory.sizes import PREFIX_BACKWARD, ROLLOUT_KV, SCORE_WORKSPACE, TRAIN_WORKSPACE, Sizes
from support.core import make_config
from support.workers import ROW_WIDTH, lay_out

Grid = tuple[int, int, int]
Drawn = tuple[int, Sequence[Grid]]
"""Text tokens and media of a row."""
SIDES = st.integers(1, 5).map(lambda n: 2 * n)
GRIDS = st.tuples(st.sampled_from([1, 1, 1, 2, 3]), SIDES, SIDES)
ROWS = st.lists(st.tuples(st.integers(1, 30), st.lists(GRIDS, max_size=3)), min_size=1, max_size=5)


def slot(group: int, row: Drawn) -> PromptSlot:
    text, grids = row
    return PromptSlot(
        group=group,
        row=group,
        tokens=text + sum(2 + t * h * w // 4 for t, h, w in grids),
        ids_offset=0,
        positions_offset=0,
        next_position=1,
        media=tuple(MediaSlot(offset=0, frames=t, height=h, width=w) for t, h, w in grids),
    )


def checked(rows: Sequence[Drawn], name: str) -> SourceChecked:
    """What the input child finds in these rows."""
    slots = [slot(0, row) for row in rows]
    return SourceChecked(
        name=name,
        fingerprint="f",
        num_rows=len(rows),
        good_rows=None,
        rejected=(),
        max_prompt_tokens=max(s.tokens for s in slots),
        max_media_rows=max(s.media_rows for s in slots),
        max_media_tokens=max(s.media_rows // 4 for s in slots),
    )


def data_of(*sources: SourceChecked) -> DataChecked:
    return DataChecked(cause=1, sources=sources, never_sampled=(), stop_ids=(), row_width=ROW_WIDTH)


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
        note(ROLLOUT_KV, sizes.rollout_kv([slots[g] for g in unit], train_sampling(config, stop_ids=()), 0))
    note(ROLLOUT_KV, sizes.rollout_kv(tests, eval_sampling(config, "held_out", stop_ids=()), 0))
    for prefix in plan.prefix:
        prompts = [slots[g] for g in prefix.groups]
        for which in Which:
            for want in sizes.prefix_unit(which, prompts, 0):
                note(want.kind, want)
        if (backward := sizes.backward_workspace(prompts, 0)) is not None:
            note(PREFIX_BACKWARD, backward)
        for index in prefix.suffix:
            responses = responses_of(config, plan.suffix[index].groups, draw)
            note(SCORE_WORKSPACE, sizes.score_workspace(responses, 0))
            note(TRAIN_WORKSPACE, *sizes.train_workspace(prompts, responses, 0))
    for some in (slots, tests):
        largest[Kind.INPUTS] = max(largest[Kind.INPUTS], lay_out(some)[1])
    for name, size_bytes in largest.items():
        assert size_bytes <= bounds[name], name


def uniform(config: Config, tokens: int, media_rows: int) -> tuple[list[PromptSlot], DataChecked]:
    """An iteration of equal prompts with one square-ish image each, and the data that has only those."""
    row: Drawn = (tokens - 2 - media_rows // 4, [(1, 2, media_rows // 2)])
    return [slot(g, row) for g in range(config.data.prompts_per_iteration)], data_of(checked([row], "train"))


@pytest.mark.parametrize("share_prefix", [True, False], ids=["shared", "replicated"])
def test_bounds_are_not_much_larger_than_the_largest_unit(model_folder: Path, share_prefix: bool) -> None:
    config = make_config(model_folder, run={"share_prefix": share_prefix})
    sizes = Sizes(config)
    slots, data = uniform(config, 60, 80)
    bounds = sizes.bounds(data)
    full = tuple(Responses(group=g, lengths=(6, 6, 6), tokens=b"") for g in range(4))
    exact = {
        ROLLOUT_KV: sizes.rollout_kv(slots, train_sampling(config, stop_ids=()), 0).size_bytes,
        SCORE_WORKSPACE: sizes.score_workspace(full, 0).size_bytes,
        TRAIN_WORKSPACE: sum(want.size_bytes for want in sizes.train_workspace(slots, full, 0)),
    }
    for which in Which:
        exact |= {want.kind: want.size_bytes for want in sizes.prefix_unit(which, slots, 0)}
    for name, size_bytes in exact.items():
        assert size_bytes <= bounds[name] <= 1.1 * size_bytes, name


def test_replicated_prefixes_are_as_large_as_so_many_prompts(model_folder: Path) -> None:
    shared, replicated = (Sizes(make_config(model_folder, run={"share_prefix": share})) for share in (True, False))
    slots, _ = uniform(make_config(model_folder), 60, 80)
    tripled = [item for item in slots for _ in range(3)]
    for which in Which:
        ours = [want.size_bytes for want in replicated.prefix_unit(which, slots, 0)]
        assert ours == [want.size_bytes for want in shared.prefix_unit(which, tripled, 0)]


def test_standing_blocks_are_as_large_as_their_tables(model_folder: Path) -> None:
    config = make_config(model_folder, model={"dtype": "bfloat16", "freeze_vision": True})
    sizes = Sizes(config)
    assert sizes.gradient_bytes == gradient_table(sizes.table).total_bytes < sizes.table.total_bytes
    assert sizes.reference_bytes == reference_table(sizes.table).total_bytes
    assert sizes.optimizer_bytes == optimizer_table(sizes.table, name="adamw", momentum=0.0).total_bytes


def test_a_unit_asks_for_its_blocks_with_their_owners_and_lifetimes(model_folder: Path) -> None:
    stream = Sizes(make_config(model_folder, run={"schedule": "stream"}))
    overlap = Sizes(make_config(model_folder, run={"schedule": "overlap"}))
    slots, _ = uniform(make_config(model_folder), 20, 8)
    some = (Responses(group=0, lengths=(1, 2, 3), tokens=b""),)
    activations, segment = overlap.prefix_unit(Which.ACTOR, slots, 5)
    assert (activations.segment, activations.owner, activations.last_consumer) == (False, Role.PREFIX, Role.PREFIX)
    assert (segment.segment, segment.owner, segment.last_consumer) == (True, Role.PREFIX, Role.TRAINER)
    assert segment.size_bytes == KvLayout(overlap.shape, 4, 20, "float32").total_bytes
    (reference,) = overlap.prefix_unit(Which.REFERENCE, slots, 5)
    assert (reference.first, reference.last, reference.reservation) == (Phase.ROLLOUT, Phase.SCORE, None)
    assert {(w.first, w.last) for w in (activations, segment)} == {(Phase.ROLLOUT, Phase.TRAIN)}
    for sizes, first in ((stream, Phase.ROLLOUT), (overlap, Phase.SCORE)):
        score = sizes.score_workspace(some, 0)
        assert (score.owner, score.first, score.last) == (Role.PREFIX, first, Phase.SCORE)
        for train in sizes.train_workspace(slots, some, 0):
            assert (train.owner, train.first, train.last) == (Role.TRAINER, first, Phase.TRAIN)
            assert train.reservation == TRAIN_WORKSPACE
    sampling = train_sampling(make_config(model_folder), stop_ids=())
    assert overlap.rollout_kv(slots, sampling, 0).first is Phase.ROLLOUT
    assert overlap.rollout_kv(slots, replace(sampling, temperature=0.0), 0).last is Phase.EVAL


@pytest.mark.parametrize(("kept", "recomputed"), [("keep", "recompute"), ("layers", "recompute_layers")])
@pytest.mark.parametrize("share_prefix", [True, False], ids=["shared", "replicated"])
def test_what_a_recomputed_unit_does_not_ask_for_its_backward_asks_for(
    model_folder: Path, share_prefix: bool, kept: str, recomputed: str
) -> None:
    sections = {"run": {"share_prefix": share_prefix}}
    keep = Sizes(make_config(model_folder, **sections, memory={"prefix_activations": kept}))
    again = Sizes(make_config(model_folder, **sections, memory={"prefix_activations": recomputed}))
    slots, _ = uniform(make_config(model_folder), 60, 80)
    activations, segment = keep.prefix_unit(Which.ACTOR, slots, 0)
    assert again.prefix_unit(Which.ACTOR, slots, 0) == (segment,)
    assert keep.backward_workspace(slots, 0) is None
    workspace = again.backward_workspace(slots, 0)
    assert workspace is not None
    assert workspace.size_bytes == activations.size_bytes
    assert (workspace.kind, workspace.reservation) == (Kind.WORKSPACE, PREFIX_BACKWARD)


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
    assert sizes.prefix_unit(Which.ACTOR, unit, 0)[0].size_bytes <= bound


@pytest.mark.parametrize("shorter", [0, 1, 3])
def test_a_unit_with_one_response_that_is_a_little_shorter_is_bounded(model_folder: Path, shorter: int) -> None:
    """Unequal lengths cost masks, which weigh more than the missing tokens."""
    config = make_config(model_folder, rollout={"group_size": 4, "max_new_tokens": 9})
    sizes = Sizes(config)
    slots, data = uniform(config, 20, 8)
    lengths = [(9, 9, 9, 9)] * 3 + [(9, 9, 9, 9 - shorter)]
    responses = tuple(Responses(group=g, lengths=each, tokens=b"") for g, each in enumerate(lengths))
    size_bytes = sum(want.size_bytes for want in sizes.train_workspace(slots, responses, 0))
    assert size_bytes <= sizes.bounds(data)[TRAIN_WORKSPACE]
