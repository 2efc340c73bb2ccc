"""Inputs of steps: made once, one step ahead, in segments that live until their own step is over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from rollplex.errors import BudgetError
from rollplex.journal.events import LeaseWaiting
from rollplex.journal.phases import Phase
from rollplex.protocol.common import Kind, Role
from rollplex.protocol.inputs import PrepareInputs, WriteInputs
from rollplex_coordinator.memory.leasing import Want
from support.core import Core, minimum_bytes
from support.workers import Stuck, prompts_of

MakeCore = Callable[..., Core]
ROWS, OTHERS = (4, 9, 14, 2), (21, 7, 3, 16)


def test_a_step_s_prompts_come_in_a_segment_of_the_size_that_the_input_child_asks_for(make_core: MakeCore) -> None:
    core = make_core()
    core.context.feed.prepare(5, "train", ROWS)
    inputs = core.context.feed.take(5)
    prompts, size_bytes = prompts_of(ROWS)
    assert (inputs.rows, inputs.prompts) == (ROWS, prompts)
    assert (inputs.ref.kind, inputs.ref.size_bytes) == (Kind.INPUTS, size_bytes)
    (prepare,), (write,) = core.sent(PrepareInputs), core.sent(WriteInputs)
    assert (prepare.step, prepare.source, prepare.rows) == (5, "train", ROWS)
    assert (write.step, write.segment) == (5, inputs.ref)
    assert core.holder.find(inputs.ref.segment) is not None
    core.context.feed.done(inputs)
    assert core.holder.find(inputs.ref.segment) is None
    assert not core.leased


def test_inputs_outlive_the_phases_of_a_step(make_core: MakeCore) -> None:
    core = make_core()
    core.context.feed.prepare(0, "train", ROWS)
    inputs = core.context.feed.take(0)
    for phase in (Phase.ROLLOUT, Phase.SCORE, Phase.TRAIN, Phase.UPDATE, Phase.EVAL, Phase.IDLE, Phase.ROLLOUT):
        core.memory.enter(phase)
    assert core.leased == {inputs.block.lease}


def test_what_is_under_way_is_not_asked_for_twice_and_what_was_taken_can_be_made_again(make_core: MakeCore) -> None:
    core = make_core()
    feed = core.context.feed
    feed.prepare(1, "train", ROWS)
    feed.prepare(1, "train", ROWS)
    first = feed.take(1)
    assert len(core.sent(PrepareInputs)) == 1
    feed.done(first)
    feed.prepare(1, "train", OTHERS)
    assert feed.take(1).rows == OTHERS
    assert len(core.sent(PrepareInputs)) == 2


@pytest.mark.parametrize("seed", range(5))
def test_two_steps_are_made_side_by_side_and_kept_apart(make_core: MakeCore, seed: int) -> None:
    core = make_core(seed)
    feed = core.context.feed
    feed.prepare(0, "train", ROWS)
    feed.prepare(1, "train", OTHERS)
    second, first = feed.take(1), feed.take(0)
    assert (first.rows, first.prompts) == (ROWS, prompts_of(ROWS)[0])
    assert (second.rows, second.prompts) == (OTHERS, prompts_of(OTHERS)[0])
    assert first.ref != second.ref


def test_nothing_is_written_before_there_is_memory_for_it(make_core: MakeCore) -> None:
    core = make_core(budget_bytes=minimum_bytes(make_core().context.config.model.path, {}))
    core.memory.enter(Phase.ROLLOUT)
    free = core.memory.view().devices[0].free_bytes
    taken = core.memory.now(
        Want(
            kind=Kind.PREFIX_ACTIVATIONS,
            size_bytes=free,
            owner=Role.PREFIX,
            last_consumer=Role.PREFIX,
            first=Phase.ROLLOUT,
            last=Phase.ROLLOUT,
            purpose="all the rest",
        )
    )
    feed = core.context.feed
    feed.prepare(0, "train", ROWS)
    with pytest.raises(Stuck):
        feed.take(0)
    assert core.events(LeaseWaiting)
    assert not core.sent(WriteInputs)
    core.memory.release(taken)
    assert feed.take(0).rows == ROWS


def test_a_size_that_the_budget_never_has_ends_the_run(make_core: MakeCore) -> None:
    core = make_core()
    honest = core.workers.answers[PrepareInputs]
    core.workers.answers[PrepareInputs] = lambda m: [replace(honest(m)[0], size_bytes=2**41)]
    core.context.feed.prepare(0, "train", ROWS)
    with pytest.raises(BudgetError, match="inputs of step 0 cannot fit"):
        core.context.feed.take(0)


def test_who_begins_a_step_again_takes_the_same_inputs_until_it_is_done_with_them(make_core: MakeCore) -> None:
    core = make_core()
    feed = core.context.feed
    feed.prepare(1, "train", ROWS)
    first = feed.take(1)
    feed.prepare(1, "train", ROWS)
    assert feed.take(1) == first
    assert len(core.sent(PrepareInputs)) == 1


def test_what_is_dropped_is_given_back_also_if_it_is_still_being_made_and_the_rest_stays(make_core: MakeCore) -> None:
    core = make_core()
    feed = core.context.feed
    feed.prepare(0, "train", ROWS)
    first = feed.take(0)
    feed.prepare(1, "train", OTHERS)
    feed.take(1)
    feed.prepare(2, "train", ROWS)
    feed.drop_from(1)
    assert len(core.sent(WriteInputs)) == 3, "the last one's segment was not taken away while it was filled"
    assert core.leased == {first.block.lease}
    feed.prepare(2, "train", OTHERS)
    assert feed.take(2).rows == OTHERS
    assert feed.take(0) == first


def test_an_input_child_that_never_finishes_what_is_dropped_is_not_waited_for_without_end(make_core: MakeCore) -> None:
    core = make_core()
    core.hub.silence(Role.INPUT, WriteInputs)
    core.context.feed.prepare(1, "train", ROWS)
    with pytest.raises(Stuck):
        core.context.feed.drop_from(1)
    assert core.link.waits.next_deadline() is not None
