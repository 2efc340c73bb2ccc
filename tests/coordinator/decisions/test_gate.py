"""The gate: one update in order, and every refusal. Any order of events: test_gate_any_order."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest

from rollplex.errors import EngineError, StateError, UpdateError
from rollplex_coordinator.decisions.gate import STORY_EVENTS, Gate, State
from rollplex_coordinator.decisions.gate_steps import (
    Apply,
    DrainReader,
    GateStep,
    JournalBegin,
    JournalCommit,
    Opened,
    Prepare,
    Skip,
    TellReader,
)

READERS = ("prefix", "rollout")


def new_gate(**options: int) -> Gate:
    gate = Gate(**options)
    for reader in READERS:
        gate.register_reader(reader, on_policy=True)
    return gate


def do_step(gate: Gate, groups: int = 2) -> tuple[GateStep, ...]:
    """All work of the next step, and its close."""
    gate.begin_step(gate.step, groups, [[group] for group in range(groups)])
    for group in range(groups):
        gate.group_sampled(group, gate.version, gate.version)
        gate.group_trained(group)
        gate.prefix_backward_done(group)
    return gate.close()


def drain_all(gate: Gate) -> tuple[GateStep, ...]:
    return [gate.reader_drained(reader, gate.version) for reader in READERS][-1]


def drop_all(gate: Gate) -> tuple[GateStep, ...]:
    return [gate.caches_dropped(reader, gate.version) for reader in READERS][-1]


def at(state: State) -> Gate:
    """A gate that has come to `state` in step 0, from version 0."""
    gate = new_gate(max_failed_votes=1 if state is State.FAILED else 3)
    if state is State.OPEN:
        return gate
    do_step(gate)
    if state is State.FAILED:
        with pytest.raises(UpdateError):
            gate.voted(finite=False)
        return gate
    if state is State.PREPARING:
        return gate
    gate.voted(finite=state is not State.SKIPPING)
    if state is State.SKIPPING:
        return gate
    drain_all(gate)
    for then, act in (
        (State.BEGINNING, gate.begun_durable),
        (State.APPLYING, lambda: gate.applied(1, "d1")),
        (State.COMMITTING, gate.committed_durable),
        (State.DROPPING, lambda: None),
    ):
        assert gate.state is then
        if state is then:
            return gate
        act()
    raise AssertionError(state)


def kinds(steps: tuple[GateStep, ...]) -> list[type[GateStep]]:
    return [type(step) for step in steps]


def test_an_update_goes_from_close_to_open_in_order() -> None:
    gate = new_gate()
    steps = do_step(gate)
    cause = steps[0].cause
    assert steps == (
        Prepare(cause=cause, step=0, version=0),
        DrainReader(cause=cause, reader="prefix", version=0),
        DrainReader(cause=cause, reader="rollout", version=0),
    )
    assert gate.voted(finite=True) == ()
    assert gate.reader_drained("rollout", 0) == ()
    assert gate.reader_drained("prefix", 0) == (JournalBegin(cause=cause + 3, step=0, version=0),)
    assert gate.begun_durable() == (Apply(cause=cause + 4, step=0, version=0),)
    assert gate.version == 0
    assert gate.applied(1, "abc") == (JournalCommit(cause=cause + 5, step=0, version=1, digest="abc"),)
    assert gate.committed_durable() == (
        TellReader(cause=cause + 6, reader="prefix", version=1),
        TellReader(cause=cause + 6, reader="rollout", version=1),
    )
    assert not gate.may_read
    assert gate.caches_dropped("prefix", 1) == ()
    assert gate.caches_dropped("rollout", 1) == (Opened(cause=cause + 8, step=0, version=1, updated=True),)
    assert (gate.state, gate.version, gate.step, gate.may_read, gate.running) == (State.OPEN, 1, 1, True, False)


def test_the_vote_may_come_after_the_readers() -> None:
    gate = at(State.PREPARING)
    assert drain_all(gate) == ()
    assert kinds(gate.voted(finite=True)) == [JournalBegin]


def test_begin_waits_for_every_reader() -> None:
    gate = at(State.PREPARING)
    gate.voted(finite=True)
    gate.reader_drained("rollout", 0)
    assert gate.state is State.PREPARING
    assert gate.awaited == ("prefix: drained",)


def test_a_failed_vote_skips_the_step_and_readers_learn_that_the_version_stays() -> None:
    gate = at(State.PREPARING)
    gate.reader_drained("rollout", 0)
    assert kinds(gate.voted(finite=False)) == [Skip]
    assert gate.skipped() == ()
    assert gate.awaited == ("prefix: drained",)
    told = gate.reader_drained("prefix", 0)
    assert [(step.reader, step.version) for step in told if isinstance(step, TellReader)] == [
        ("prefix", 0),
        ("rollout", 0),
    ]
    (opened,) = drop_all(gate)
    assert isinstance(opened, Opened)
    assert (opened.version, opened.updated, gate.version, gate.step, gate.skipped_steps) == (0, False, 0, 1, 1)
    assert kinds(do_step(gate)) == [Prepare, DrainReader, DrainReader]


def fail_vote(gate: Gate) -> None:
    do_step(gate)
    gate.voted(finite=False)
    gate.skipped()
    drain_all(gate)
    drop_all(gate)


def test_too_many_failed_votes_in_a_row_end_the_run_with_the_weights_whole() -> None:
    gate = new_gate(max_failed_votes=3)
    fail_vote(gate)
    fail_vote(gate)
    do_step(gate)
    with pytest.raises(UpdateError, match="3 failed votes in a row") as caught:
        gate.voted(finite=False)
    assert "weights unchanged at version 0" in str(caught.value)
    assert gate.state is State.FAILED
    with pytest.raises(StateError):
        gate.skipped()


def test_a_vote_that_passes_starts_the_count_again() -> None:
    gate = new_gate(max_failed_votes=2)
    fail_vote(gate)
    do_step(gate)
    gate.voted(finite=True)
    drain_all(gate)
    gate.begun_durable()
    gate.applied(1, "d")
    gate.committed_durable()
    drop_all(gate)
    fail_vote(gate)
    assert gate.state is State.OPEN
    assert gate.skipped_steps == 2


def test_an_abandoned_step_drops_its_gradients_and_begins_again() -> None:
    gate = new_gate()
    gate.begin_step(0, 2, [[0, 1]])
    gate.group_sampled(0, 0, 0)
    assert kinds(gate.abandon()) == [Skip, DrainReader, DrainReader]
    gate.skipped()
    drain_all(gate)
    (opened,) = drop_all(gate)
    assert isinstance(opened, Opened)
    assert not opened.updated
    assert (gate.step, gate.version, gate.skipped_steps) == (0, 0, 0)
    assert kinds(do_step(gate)) == [Prepare, DrainReader, DrainReader]


def test_a_rollout_that_does_not_sample_from_the_mapped_weights_is_refused() -> None:
    gate = new_gate()
    with pytest.raises(EngineError, match="does not sample from the mapped weights"):
        gate.register_reader("other", on_policy=False)
    assert gate.readers == frozenset(READERS)


def test_recorded_responses_are_let_in_by_name_alone() -> None:
    gate = new_gate()
    gate.register_reader("other", on_policy=False, replayed=True)
    assert gate.readers == frozenset({*READERS, "other"})


@pytest.mark.parametrize(("start", "end"), [(1, 0), (0, 1), (1, 1), (-1, 0)])
def test_a_group_from_another_version_is_refused(start: int, end: int) -> None:
    gate = new_gate()
    gate.begin_step(0, 1, [[0]])
    refused(gate, lambda: gate.group_sampled(0, start, end), "tokens of version 0 alone")


def test_a_step_that_is_not_complete_does_not_close() -> None:
    gate = new_gate()
    gate.begin_step(0, 3, [[0, 2], [1]])
    refused(gate, gate.close, "groups [0, 1, 2] trained before")
    for group in (0, 1, 2):
        refused(gate, partial(gate.group_trained, group), "sampled")
        gate.group_sampled(group, 0, 0)
        refused(gate, partial(gate.group_sampled, group, 0, 0), "each group once")
        if group == 2:
            refused(gate, lambda: gate.prefix_backward_done(0), "groups [2] trained before")
        gate.group_trained(group)
        refused(gate, partial(gate.group_trained, group), "each group once")
    gate.prefix_backward_done(0)
    refused(gate, lambda: gate.prefix_backward_done(0), "each prefix unit once")
    refused(gate, gate.close, "backward of prefix units [1] before")
    for group in (-1, 3):
        refused(gate, partial(gate.group_sampled, group, 0, 0), "group from 0 to 2")
        refused(gate, partial(gate.prefix_backward_done, group), "unit from 0 to 1")
    gate.prefix_backward_done(1)
    assert kinds(gate.close()) == [Prepare, DrainReader, DrainReader]


@pytest.mark.parametrize("units", [[], [[0]], [[0, 1], [1]], [[0], [2]], [[0, 0], [1]]])
def test_prefix_units_hold_each_group_once(units: list[list[int]]) -> None:
    gate = new_gate()
    refused(gate, lambda: gate.begin_step(0, 2, units), "each group in exactly one unit")


def test_steps_follow_each_other_without_gap_or_repeat() -> None:
    gate = new_gate(step=7, version=5)
    refused(gate, lambda: gate.begin_step(8, 1, [[0]]), "step 7")
    gate.begin_step(7, 1, [[0]])
    refused(gate, lambda: gate.begin_step(7, 1, [[0]]), "no step under way")
    gate.group_sampled(0, 5, 5)


def test_the_trainer_publishes_exactly_the_next_version_with_a_digest() -> None:
    gate = at(State.APPLYING)
    refused(gate, lambda: gate.applied(0, "d"), "version 1")
    refused(gate, lambda: gate.applied(2, "d"), "version 1")
    refused(gate, lambda: gate.applied(1, ""), "a digest")


@pytest.mark.parametrize("state", [State.PREPARING, State.SKIPPING])
def test_a_drain_counts_once_from_each_reader_at_the_version(state: State) -> None:
    gate = at(state)
    refused(gate, lambda: gate.reader_drained("rollout", 1), "version 0")
    refused(gate, lambda: gate.reader_drained("nobody", 0), "one of the readers")
    gate.reader_drained("rollout", 0)
    refused(gate, lambda: gate.reader_drained("rollout", 0), "each reader once")


def test_dropped_caches_count_once_from_each_reader_at_the_new_version() -> None:
    gate = at(State.DROPPING)
    refused(gate, lambda: gate.caches_dropped("rollout", 0), "version 1")
    refused(gate, lambda: gate.caches_dropped("nobody", 1), "one of the readers")
    gate.caches_dropped("rollout", 1)
    refused(gate, lambda: gate.caches_dropped("rollout", 1), "each reader once")


EVENTS: dict[str, tuple[Callable[[Gate], Any], set[State]]] = {
    "register_reader": (lambda gate: gate.register_reader("new", on_policy=True), {State.OPEN}),
    "remove_reader": (lambda gate: gate.remove_reader("rollout"), set(State)),
    "begin_step": (lambda gate: gate.begin_step(0, 1, [[0]]), {State.OPEN}),
    "group_sampled": (lambda gate: gate.group_sampled(0, gate.version, gate.version), set()),
    "group_trained": (lambda gate: gate.group_trained(0), set()),
    "prefix_backward_done": (lambda gate: gate.prefix_backward_done(0), set()),
    "close": (lambda gate: gate.close(), set()),
    "abandon": (lambda gate: gate.abandon(), set()),
    "voted": (lambda gate: gate.voted(finite=True), {State.PREPARING}),
    "reader_drained": (lambda gate: gate.reader_drained("rollout", 0), {State.PREPARING, State.SKIPPING}),
    "begun_durable": (lambda gate: gate.begun_durable(), {State.BEGINNING}),
    "applied": (lambda gate: gate.applied(1, "d"), {State.APPLYING}),
    "committed_durable": (lambda gate: gate.committed_durable(), {State.COMMITTING}),
    "skipped": (lambda gate: gate.skipped(), {State.SKIPPING}),
    "caches_dropped": (lambda gate: gate.caches_dropped("rollout", gate.version), {State.DROPPING}),
}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("name", EVENTS)
def test_each_event_is_allowed_in_its_states_and_refused_in_all_others(name: str, state: State) -> None:
    act, allowed = EVENTS[name]
    gate = at(state)
    if state in allowed:
        act(gate)
    else:
        refused(gate, lambda: act(gate), "")


def refused(gate: Gate, act: Callable[[], Any], needed: str) -> None:
    before = deepcopy(vars(gate))
    with pytest.raises(StateError) as caught:
        act()
    assert needed in caught.value.needed
    tally, old = vars(gate).pop("_tally"), before.pop("_tally")
    assert (tally is None) == (old is None)
    assert tally is None or vars(tally) == vars(old)
    assert vars(gate) == before
    gate._tally = tally


def test_a_refusal_tells_from_where_to_what_and_the_story() -> None:
    gate = new_gate()
    for group in range(30):
        if group == 0:
            gate.begin_step(0, 30, [range(30)])
        gate.group_sampled(group, 0, 0)
    with pytest.raises(StateError) as caught:
        gate.committed_durable()
    text = str(caught.value)
    assert "gate open, step 0, version 0" in text
    assert "committed_durable" in text
    assert "#33 open: group_sampled 29" in text
    assert text.count("#") == STORY_EVENTS


def test_a_reader_that_dies_is_awaited_no_more() -> None:
    gate = at(State.PREPARING)
    gate.voted(finite=True)
    gate.reader_drained("rollout", 0)
    assert kinds(gate.remove_reader("prefix")) == [JournalBegin]
    gate.begun_durable()
    gate.applied(1, "d")
    assert gate.remove_reader("rollout") == ()
    assert kinds(gate.committed_durable()) == [Opened]
    refused(gate, lambda: gate.remove_reader("rollout"), "one of the readers []")


def test_a_reader_that_has_drained_and_dies_does_not_stop_the_others() -> None:
    gate = at(State.PREPARING)
    gate.voted(finite=True)
    gate.reader_drained("rollout", 0)
    assert gate.remove_reader("rollout") == ()
    assert kinds(gate.reader_drained("prefix", 0)) == [JournalBegin]


def test_awaited_names_everything_and_is_empty_when_the_gate_is_open() -> None:
    assert at(State.OPEN).awaited == ()
    assert at(State.PREPARING).awaited == ("trainer: vote", "prefix: drained", "rollout: drained")
    assert at(State.BEGINNING).awaited == ("journal: BEGIN on disk",)
    assert at(State.APPLYING).awaited == ("trainer: update applied",)
    assert at(State.COMMITTING).awaited == ("journal: COMMIT on disk",)
    assert at(State.SKIPPING).awaited == ("trainer: gradients dropped", "prefix: drained", "rollout: drained")
    assert at(State.DROPPING).awaited == ("prefix: caches dropped", "rollout: caches dropped")


@pytest.mark.parametrize("state", [State.OPEN, State.PREPARING, State.SKIPPING])
def test_when_all_are_lost_before_begin_the_step_begins_again_as_if_it_had_not(state: State) -> None:
    gate = at(state)
    if state is State.OPEN:
        gate.begin_step(0, 1, [[0]])
        gate.group_sampled(0, 0, 0)
    assert gate.settled
    assert gate.lost() == ()
    assert (gate.state, gate.version, gate.step, gate.readers) == (State.OPEN, 0, 0, frozenset())
    assert (gate.failed_votes, gate.skipped_steps, gate.running) == (0, 0, False)
    for reader in READERS:
        gate.register_reader(reader, on_policy=True)
    do_step(gate)
    gate.voted(finite=True)
    assert type(drain_all(gate)[0]) is JournalBegin


def test_when_all_are_lost_after_commit_the_step_is_over() -> None:
    gate = at(State.DROPPING)
    gate.caches_dropped("prefix", 1)
    (opened,) = gate.lost()
    assert isinstance(opened, Opened)
    assert (opened.version, opened.updated) == (1, True)
    assert (gate.state, gate.version, gate.step) == (State.OPEN, 1, 1)


def test_when_all_are_lost_after_a_failed_vote_was_obeyed_the_step_is_over_too() -> None:
    gate = at(State.SKIPPING)
    drain_all(gate)
    gate.skipped()
    (opened,) = gate.lost()
    assert isinstance(opened, Opened)
    assert (opened.version, opened.updated) == (0, False)
    assert (gate.step, gate.failed_votes) == (1, 1)


@pytest.mark.parametrize("state", [State.BEGINNING, State.APPLYING, State.COMMITTING, State.FAILED])
def test_between_begin_and_commit_nobody_goes_on_with_the_weights(state: State) -> None:
    gate = at(state)
    assert not gate.settled
    with pytest.raises(StateError, match="weights that are whole"):
        gate.lost()
