"""The schedule under every order of events that services could produce."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.errors import StateError
from rollplex.journal.phases import Phase
from rollplex.protocol.prefix import Which
from rollplex_coordinator.decisions.instructions import (
    Ask,
    Backward,
    Complete,
    Enter,
    Forward,
    Generate,
    Mode,
    Reward,
    Score,
    Train,
)
from rollplex_coordinator.decisions.plan import plan_step
from rollplex_coordinator.decisions.schedule import Schedule
from support.step_world import World, play

small = st.integers(0, 4)


@settings(max_examples=300)
@given(
    mode=st.sampled_from(Mode),
    seed=st.integers(0, 10**6),
    room=st.integers(1, 3),
    reference=st.booleans(),
    after_prefill=st.booleans(),
    tells=st.booleans(),
    groups=st.integers(1, 7),
    decode=small,
    prefix=small,
    suffix=small,
)
def test_every_order_of_events_ends_with_every_group_trained_once(
    mode: Mode,
    seed: int,
    room: int,
    reference: bool,
    after_prefill: bool,
    tells: bool,
    groups: int,
    decode: int,
    prefix: int,
    suffix: int,
) -> None:
    world = play(
        mode,
        seed=seed,
        room=room,
        reference=reference,
        after_prefill=after_prefill,
        tells=tells,
        groups=groups,
        decode=decode,
        prefix=prefix,
        suffix=suffix,
    )
    trained = [i.unit for i in world.log if isinstance(i, Train)]
    assert trained == list(range(len(world.plan.suffix)))
    assert [i.unit for i in world.log if isinstance(i, Backward)] == list(range(len(world.plan.prefix)))
    assert sorted(i.group for i in world.log if isinstance(i, Reward)) == list(range(groups))
    scored = [i.unit for i in world.log if isinstance(i, Score)]
    assert sorted(scored) == (list(range(len(world.plan.suffix))) if reference else [])
    assert not any(world.held.values())
    assert world.log[-1] == Complete()
    assert [i.phase for i in world.log if isinstance(i, Enter)] == [Phase.ROLLOUT, Phase.SCORE, Phase.TRAIN]


@pytest.mark.parametrize("seed", range(5))
def test_serial_runs_no_prefix_work_before_the_rollout_is_over(seed: int) -> None:
    log = play(Mode.SERIAL, seed=seed).log
    over = log.index(Enter(phase=Phase.SCORE))
    assert not any(isinstance(i, Ask | Forward | Score | Train | Backward) for i in log[:over])


@pytest.mark.parametrize("seed", range(5))
def test_overlap_runs_prefix_forwards_but_no_suffix_during_the_rollout(seed: int) -> None:
    log = play(Mode.OVERLAP, seed=seed).log
    over = log.index(Enter(phase=Phase.SCORE))
    assert any(isinstance(i, Forward) for i in log[:over])
    assert not any(isinstance(i, Score | Train | Backward) for i in log[:over])


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("replicas", [1, 2])
def test_one_unit_of_a_replica_has_memory_before_it_runs_and_the_next_asks_when_that_one_begins(
    mode: Mode, replicas: int
) -> None:
    for seed in range(20):
        world = play(mode, seed=seed, room=3, groups=6, prefix=1, replicas=replicas)
        ahead = [0] * replicas
        for found in world.log:
            if isinstance(found, Ask | Forward):
                ahead[world.plan.replica_of(found.unit)] += 1 if isinstance(found, Ask) else -1
                assert 0 <= min(ahead) <= max(ahead) <= 1
        assert ahead == [0] * replicas


def test_prefix_work_is_beside_a_rollout_from_its_first_forward_to_its_last_or_the_rollouts_end() -> None:
    plan = plan_step(2, decode_prompts=2, prefix_prompts=1, suffix_prompts=1)
    schedule = Schedule(plan, Mode.OVERLAP, reference=False, batch_rewards=False)
    seen = [schedule.beside]
    for event in (
        schedule.start,
        lambda: schedule.granted(Which.ACTOR, 0),
        lambda: schedule.forward_done(Which.ACTOR, 0),
        lambda: schedule.granted(Which.ACTOR, 1),
        lambda: schedule.group_finished(0),
        lambda: schedule.group_finished(1),
        lambda: schedule.generated(0),
        lambda: schedule.forward_done(Which.ACTOR, 1),
    ):
        event()
        seen.append(schedule.beside)
    assert seen == [False, False, True, False, True, True, True, False, False]


def test_scoring_keeps_to_no_share_and_is_not_beside() -> None:
    plan = plan_step(2, decode_prompts=1, prefix_prompts=1, suffix_prompts=1)
    schedule = Schedule(plan, Mode.STREAM, reference=True, batch_rewards=False)
    schedule.start()
    schedule.granted(Which.REFERENCE, 0)
    schedule.group_finished(0)
    assert schedule.beside
    assert Score(unit=0, release=True) in schedule.forward_done(Which.REFERENCE, 0)
    assert not schedule.beside


@pytest.mark.parametrize("mode", Mode)
def test_prefix_work_is_never_beside_a_rollout_that_is_over(mode: Mode) -> None:
    world = play(mode, seed=1)
    assert not world.schedule.beside
    assert mode is not Mode.SERIAL or not any(
        isinstance(i, Forward) for i in world.log[: world.log.index(Enter(phase=Phase.SCORE))]
    )


@pytest.mark.parametrize("mode", [Mode.OVERLAP, Mode.STREAM])
@pytest.mark.parametrize("seed", range(8))
def test_after_prefill_no_forward_begins_while_prompts_of_a_decode_unit_are_read(mode: Mode, seed: int) -> None:
    world = play(mode, seed=seed, after_prefill=True, tells=True, decode=2)
    plan, reading, begun = world.plan, False, 0
    schedule = Schedule(plan, mode, reference=True, batch_rewards=False, after_prefill=True)
    again = World(schedule=schedule, plan=plan, rng=random.Random(seed), room=99, tells=True)
    again.take(schedule.start())
    while not schedule.complete:
        seen = len(again.log)
        again.step()
        if again.events[-1].startswith("prefilled"):
            reading = False
        for instruction in again.log[seen:]:
            reading = reading or isinstance(instruction, Generate)
            begun += isinstance(instruction, Forward)
            assert not (reading and isinstance(instruction, Ask | Forward)), again.events[-1]
    assert begun == 2 * len(plan.prefix)


@pytest.mark.parametrize("seed", range(4))
def test_after_prefill_a_rollout_that_does_not_tell_has_the_device_to_itself(seed: int) -> None:
    log = play(Mode.OVERLAP, seed=seed, after_prefill=True, tells=False).log
    assert not any(isinstance(i, Ask | Forward) for i in log[: log.index(Enter(phase=Phase.SCORE))])


def test_a_unit_is_prefilled_once_and_while_it_is_sampled() -> None:
    plan = plan_step(2, decode_prompts=1, prefix_prompts=1, suffix_prompts=1)
    schedule = Schedule(plan, Mode.OVERLAP, reference=False, batch_rewards=False, after_prefill=True)
    schedule.start()
    with pytest.raises(StateError, match="decode unit 1 prefilled"):
        schedule.prefilled(1)
    assert schedule.prefilled(0) == [Ask(which=Which.ACTOR, unit=0)]
    with pytest.raises(StateError, match="each unit once"):
        schedule.prefilled(0)


def test_stream_trains_finished_groups_while_others_are_sampled() -> None:
    worlds = [play(Mode.STREAM, seed=seed) for seed in range(20)]
    early = [
        any(isinstance(i, Train) for i in world.log[: world.log.index(Enter(phase=Phase.SCORE))]) for world in worlds
    ]
    assert any(early)


def test_rewards_of_the_whole_step_are_awaited_when_advantages_need_them() -> None:
    for seed in range(20):
        world = play(Mode.STREAM, seed=seed, batch=True)
        first_train = next(n for n, e in enumerate(world.events) if "Train" in e)
        assert sum("Reward" in e for e in world.events[:first_train]) == world.plan.num_groups


def test_an_event_that_cannot_happen_is_refused_with_what_is_awaited() -> None:
    plan = plan_step(2, decode_prompts=0, prefix_prompts=1, suffix_prompts=1)
    schedule = Schedule(plan, Mode.OVERLAP, reference=True, batch_rewards=False)
    schedule.start()
    with pytest.raises(StateError, match="decode unit 0 done.*groups"):
        schedule.generated(0)
    with pytest.raises(StateError, match="prefix service did"):
        schedule.forward_done(Which.ACTOR, 0)
    schedule.group_finished(0)
    with pytest.raises(StateError, match="each group once"):
        schedule.group_finished(0)
    with pytest.raises(StateError, match="a unit that was asked for"):
        schedule.granted(Which.ACTOR, 1)
    with pytest.raises(StateError, match="suffix unit 0 trained"):
        schedule.trained(0)
    with pytest.raises(StateError, match="a step that has not started"):
        schedule.start()
