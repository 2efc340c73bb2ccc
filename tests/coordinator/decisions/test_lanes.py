"""Several engines and replicas: each has its own place in the step, whatever the others do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.journal.phases import Phase
from rollplex.protocol.prefix import Which
from rollplex_coordinator.decisions.instructions import (
    Ask,
    Backward,
    Complete,
    Enter,
    Forward,
    Generate,
    Instruction,
    Mode,
    Reward,
    Score,
    Train,
)
from rollplex_coordinator.decisions.plan import StepPlan, plan_step
from rollplex_coordinator.decisions.schedule import Schedule
from support.step_world import World, play


@settings(max_examples=300)
@given(
    mode=st.sampled_from(Mode),
    seed=st.integers(0, 10**6),
    room=st.integers(1, 3),
    reference=st.booleans(),
    batch=st.booleans(),
    after_prefill=st.booleans(),
    tells=st.booleans(),
    groups=st.integers(1, 9),
    decode=st.integers(0, 3),
    prefix=st.integers(0, 3),
    suffix=st.integers(0, 2),
    engines=st.integers(1, 4),
    replicas=st.integers(1, 4),
)
def test_every_unit_is_done_once_in_its_lane_and_the_step_ends(
    mode: Mode,
    seed: int,
    room: int,
    reference: bool,
    batch: bool,
    after_prefill: bool,
    tells: bool,
    **sizes: int,
) -> None:
    world = play(
        mode,
        seed=seed,
        room=room,
        reference=reference,
        batch=batch,
        after_prefill=after_prefill,
        tells=tells,
        **sizes,
    )
    plan, log = world.plan, world.log
    assert sorted(i.group for i in log if isinstance(i, Reward)) == list(range(sizes["groups"]))
    for engine in range(plan.engines):
        assert _units(log, Generate, plan.decode_of(engine)) == list(plan.decode_of(engine))
    for replica in range(plan.replicas):
        assert _units(log, Train, plan.suffix_of(replica)) == list(plan.suffix_of(replica))
        assert _units(log, Backward, plan.prefix_of(replica)) == list(plan.prefix_of(replica))
        assert _asked(log, plan.prefix_of(replica)) == [
            (which, unit)
            for which in ((Which.REFERENCE, Which.ACTOR) if reference else (Which.ACTOR,))
            for unit in plan.prefix_of(replica)
        ]
    scored = [i.unit for i in log if isinstance(i, Score)]
    assert sorted(scored) == (list(range(len(plan.suffix))) if reference else [])
    assert [i.phase for i in log if isinstance(i, Enter)] == [Phase.ROLLOUT, Phase.SCORE, Phase.TRAIN]
    assert log[-1] == Complete()
    assert not any(world.held.values())


def _units(log: Sequence[Instruction], kind: type[Generate | Train | Backward], of: Sequence[int]) -> list[int]:
    return [i.unit for i in log if isinstance(i, kind) and i.unit in of]


def _asked(log: Sequence[Instruction], of: Sequence[int]) -> list[tuple[Which, int]]:
    return [(i.which, i.unit) for i in log if isinstance(i, Ask) and i.unit in of]


@settings(max_examples=200)
@given(
    mode=st.sampled_from(Mode),
    seed=st.integers(0, 10**6),
    engines=st.integers(1, 4),
    replicas=st.integers(1, 4),
    groups=st.integers(1, 9),
)
def test_no_lane_has_two_units_at_a_time(mode: Mode, seed: int, engines: int, replicas: int, groups: int) -> None:
    plan = plan_step(groups, decode_prompts=1, prefix_prompts=1, suffix_prompts=1, engines=engines, replicas=replicas)
    schedule = Schedule(plan, mode, reference=True, batch_rewards=False)
    world = World(schedule=schedule, plan=plan, rng=play(mode, groups=1).rng, room=2)
    world.rng.seed(seed)
    world.take(schedule.start())
    while not schedule.complete:
        busy = _busy(world, plan)
        assert len(busy) == len(set(busy)), busy
        world.step()


def _busy(world: World, plan: StepPlan) -> list[tuple[str, int]]:
    """The lane of each unit that is under way."""
    lanes = [("rollout", plan.engine_of(int(str(what)))) for name, what in world.pending if name == "generated"]
    for _, job in world.pending:
        match job:
            case Forward(unit=unit) | Backward(unit=unit):
                lanes.append(("prefix", plan.replica_of(unit)))
            case Score(unit=unit):
                lanes.append(("prefix", plan.replica_of(plan.suffix[unit].prefix)))
            case Train(unit=unit):
                lanes.append(("trainer", plan.replica_of(plan.suffix[unit].prefix)))
            case _:
                pass
    return lanes


def test_engines_and_replicas_begin_together() -> None:
    plan = plan_step(4, decode_prompts=1, prefix_prompts=1, suffix_prompts=1, engines=2, replicas=2)
    schedule = Schedule(plan, Mode.OVERLAP, reference=False, batch_rewards=False)
    assert schedule.start() == [
        Enter(phase=Phase.ROLLOUT),
        Generate(unit=0),
        Generate(unit=1),
        Ask(which=Which.ACTOR, unit=0),
        Ask(which=Which.ACTOR, unit=1),
    ]
    assert schedule.granted(Which.ACTOR, 1) == [Forward(which=Which.ACTOR, unit=1), Ask(which=Which.ACTOR, unit=3)]
    schedule.group_finished(1)
    assert schedule.generated(1) == [Generate(unit=3)]


def test_a_replica_without_units_is_done_from_the_beginning() -> None:
    world = play(Mode.STREAM, groups=1, engines=3, replicas=3)
    assert [i.unit for i in world.log if isinstance(i, Train)] == [0]


def test_after_prefill_prefix_work_waits_for_the_prompts_of_every_engine() -> None:
    plan = plan_step(2, decode_prompts=1, prefix_prompts=1, suffix_prompts=1, engines=2, replicas=1)
    schedule = Schedule(plan, Mode.OVERLAP, reference=False, batch_rewards=False, after_prefill=True)
    schedule.start()
    assert schedule.prefilled(0) == []
    assert schedule.prefilled(1) == [Ask(which=Which.ACTOR, unit=0)]


@pytest.mark.parametrize("mode", Mode)
def test_scores_and_gradients_of_a_batch_wait_for_the_slowest_engine_unless_streamed(mode: Mode) -> None:
    early = []
    for seed in range(20):
        log = play(mode, seed=seed, engines=2, replicas=2, decode=2, prefix=1).log
        early.append(any(isinstance(i, Score | Train) for i in log[: log.index(Enter(phase=Phase.SCORE))]))
    assert any(early) == (mode is Mode.STREAM)
