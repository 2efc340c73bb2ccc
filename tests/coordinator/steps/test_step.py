"""A training step over workers without processes: which messages, with which leases, whatever order answers come in."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rollplex.errors import RewardError, StateError
from rollplex.journal import events
from rollplex.journal.events import UnitKind
from rollplex.protocol.common import Role
from rollplex.protocol.prefix import PrefixBackward, PrefixForward, ScoreSuffix, Which
from rollplex.protocol.reward import RewardGroup, RewardProblem
from rollplex.protocol.rollout import GenerateUnit, GroupFinished
from rollplex.protocol.trainer import TrainSuffix
from rollplex_coordinator.decisions.plan import StepPlan
from rollplex_coordinator.memory.leasing import Memory
from rollplex_coordinator.steps.feed import StepInputs
from rollplex_coordinator.steps.gathered import Gathered
from support.core import AMPLE, Core, make_config, minimum_bytes
from support.workers import doubles, reward_failed

MakeCore = Callable[..., Core]
ROWS = (4, 9, 14, 2, 21, 7)
STEP = 3


def draw_sections(rng: random.Random) -> dict[str, Any]:
    """Some configuration of six prompts."""
    prefix = rng.choice([0, 1, 2, 3, 4])
    mode = rng.choice(["serial", "overlap", "stream"])
    return {
        "run": {"schedule": mode, "share_prefix": rng.random() < 0.7},
        "data": {"prompts_per_iteration": len(ROWS)},
        "algorithm": {
            "beta": rng.choice([0.0, 0.1]),
            "scale_rewards": rng.choice(["group", "none"] if mode == "stream" else ["group", "batch"]),
        },
        "batching": {
            "decode_prompts": rng.choice([0, 1, 2, 4]),
            "prefix_prompts": prefix,
            "suffix_prompts": rng.choice([n for n in range(1, (prefix or 6) + 1) if (prefix or 6) % n == 0]),
        },
        "memory": {"prefix_activations": rng.choice(["keep", "recompute"])},
    }


def of_groups(answers: Any, groups: tuple[int, ...]) -> bool:
    return tuple(answer.group for answer in answers) == groups


def check_rollout_and_rewards(core: Core, plan: StepPlan, inputs: StepInputs, done: Gathered) -> None:
    generated = core.sent(GenerateUnit)
    assert [m.unit for m in generated] == list(range(len(plan.decode)))
    for m in generated:
        assert m.prompts == tuple(inputs.prompts[g] for g in plan.decode[m.unit])
        assert (m.step, m.version, m.inputs, m.sampling) == (STEP, 0, inputs.ref, core.context.sampling)
        assert m.kv.size_bytes == core.sizes.wants.rollout_kv(m.prompts, m.sampling, m.unit).size_bytes
    rewards = core.sent(RewardGroup)
    assert sorted(m.responses.group for m in rewards) == list(range(len(ROWS)))
    for m in rewards:
        assert (m.step, m.source, m.row) == (STEP, "train", ROWS[m.responses.group])
        assert m.responses == done.responses[m.responses.group]
        assert m.stopped == tuple(length % 2 == 0 for length in m.responses.lengths)  # the fake's rule


def check_prefixes(core: Core, plan: StepPlan, inputs: StepInputs, done: Gathered) -> None:
    forwards = core.sent(PrefixForward)
    kinds = [Which.REFERENCE, Which.ACTOR] if core.context.config.needs_reference else [Which.ACTOR]
    assert [(m.which, m.unit) for m in forwards] == [(which, unit.index) for which in kinds for unit in plan.prefix]
    for m in forwards:
        wants = core.sizes.wants.prefix_unit(m.which, m.prompts, m.unit)
        private = next((want for want in wants if not want.segment), None)
        assert m.prompts == tuple(inputs.prompts[g] for g in plan.prefix[m.unit].groups)
        assert (m.step, m.version, m.inputs, m.copies) == (STEP, 0, inputs.ref, core.sizes.copies)
        assert (m.lease is None) == (private is None) == (m.which is Which.ACTOR and core.sizes.recompute)
        if m.lease is not None and private is not None:
            assert (m.lease.kind, m.lease.size_bytes) == (private.kind, private.size_bytes)
        assert m.activations == core.context.config.memory.prefix_activations
        assert (m.kv is None) == (m.which is Which.REFERENCE)
        assert m.kv is None or m.kv.size_bytes == wants[-1].size_bytes
    scores = core.sent(ScoreSuffix)
    assert len(scores) == (len(plan.suffix) if core.context.config.needs_reference else 0)
    for m in scores:
        unit = plan.suffix[m.suffix_unit]
        assert m.responses == tuple(done.responses[g] for g in unit.groups)
        assert (m.step, m.unit) == (STEP, unit.prefix)
        assert m.release == (m.suffix_unit == plan.prefix[unit.prefix].suffix[-1])
        assert m.workspace.size_bytes == core.sizes.wants.score_workspace(m.responses, m.suffix_unit).size_bytes
    backwards = core.sent(PrefixBackward)
    assert [m.unit for m in backwards] == [unit.index for unit in plan.prefix]
    for m in backwards:
        want = core.sizes.wants.backward_workspace(tuple(inputs.prompts[g] for g in plan.prefix[m.unit].groups), m.unit)
        assert (m.step, m.version) == (STEP, 0)
        assert (m.workspace is None) == (want is None)
        assert m.workspace is None or want is None or m.workspace.size_bytes == want.size_bytes


def check_training(core: Core, plan: StepPlan, inputs: StepInputs, done: Gathered) -> None:
    kv = {m.unit: m.kv for m in core.sent(PrefixForward) if m.which is Which.ACTOR}
    batch = core.context.config.algorithm.scale_rewards == "batch"
    trained = core.sent(TrainSuffix)
    assert [m.suffix_unit for m in trained] == [unit.index for unit in plan.suffix]
    for m in trained:
        unit = plan.suffix[m.suffix_unit]
        prefix = plan.prefix[unit.prefix]
        assert m.prompts == tuple(inputs.prompts[g] for g in prefix.groups)
        assert (m.step, m.version, m.unit, m.copies) == (STEP, 0, unit.prefix, core.sizes.copies)
        assert m.kv == kv[unit.prefix]
        assert (m.first, m.release) == (m.suffix_unit == prefix.suffix[0], m.suffix_unit == prefix.suffix[-1])
        assert m.responses == tuple(done.responses[g] for g in unit.groups)
        assert m.rollout_logprobs == tuple(done.rollout_logprobs[g] for g in unit.groups)
        assert of_groups(m.reference_logprobs, unit.groups if core.context.config.needs_reference else ())
        assert m.rewards == tuple(done.rewards[g] for g in unit.groups)
        assert m.batch_rewards == (b"".join(done.rewards[g] for g in range(len(ROWS))) if batch else b"")
        sizes = [want.size_bytes for want in core.sizes.wants.train_workspace(m.prompts, m.responses, 0)]
        assert [m.workspace.size_bytes, m.scratch.size_bytes] == sizes
        assert m.workspace.lease != m.scratch.lease


def check_records(core: Core, plan: StepPlan, done: Gathered) -> None:
    units = [(unit.kind, unit.unit, unit.groups) for unit in core.events(events.UnitDone)]
    expected = [(UnitKind.GENERATE, n, groups) for n, groups in enumerate(plan.decode)]
    suffixes = [UnitKind.SUFFIX]
    prefixes = [UnitKind.ACTOR_PREFIX, UnitKind.PREFIX_BACKWARD]
    if core.context.config.needs_reference:
        suffixes.append(UnitKind.SCORE)
        prefixes.append(UnitKind.REFERENCE_PREFIX)
    expected += [(kind, unit.index, unit.groups) for kind in suffixes for unit in plan.suffix]
    expected += [(kind, unit.index, unit.groups) for kind in prefixes for unit in plan.prefix]
    assert sorted(units) == sorted(expected)
    for unit in core.events(events.UnitDone):
        assert (unit.decode_start_s is not None) == (unit.kind is UnitKind.GENERATE)
        assert unit.decode_start_s is None or unit.start_s < unit.decode_start_s < unit.end_s
    everyone = list(range(len(ROWS)))
    for kind in (events.GroupFinished, events.GroupRewarded):
        assert sorted(event.group for event in core.events(kind)) == everyone
        assert {event.group: event.row for event in core.events(kind)} == dict(enumerate(ROWS))
    for found in (done.responses, done.rollout_logprobs, done.rewards, done.by_function, done.stopped):
        assert sorted(found) == everyone
    phases = [event.phase for event in core.events(events.PhaseEntered) if event.step == STEP]
    assert phases == ["ROLLOUT", "SCORE", "TRAIN"]


def check_memory(core: Core, inputs: StepInputs) -> None:
    """All leases but the inputs' are given back, with what was measured under them, and their segments closed."""
    core.ledger.check_integrity()
    assert core.leased == {inputs.block.lease}
    assert core.memory.audit() == {inputs.block.lease: (inputs.ref.size_bytes, inputs.ref.size_bytes)}
    assert set(core.holder.measured()) == {inputs.block.lease}
    granted = {event.lease: event for event in core.events(events.LeaseGranted)}
    released = core.events(events.LeaseReleased)
    assert len(released) == len({event.lease for event in released}) == len(granted) - len(core.standing) - 1
    for event in released:
        assert event.size_bytes == granted[event.lease].size_bytes
        private = granted[event.lease].segment is None
        assert event.held_bytes == (event.size_bytes if private else None)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_order_answers_come_in_messages_and_leases_are_right_and_all_leases_come_back(
    seed: int, model_folder: Path, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    sections = draw_sections(rng)
    budget_bytes = minimum_bytes(model_folder, sections) if rng.random() < 0.5 else AMPLE
    with Core(make_config(model_folder, **sections), tmp_path, rng, budget_bytes) as core:
        core.context.gate._step = STEP
        step, inputs = core.begin(ROWS, STEP)
        plan = core.plan(len(ROWS))
        done = step.run()
        check_rollout_and_rewards(core, plan, inputs, done)
        check_prefixes(core, plan, inputs, done)
        check_training(core, plan, inputs, done)
        check_records(core, plan, done)
        check_memory(core, inputs)
        assert core.link.waits.open == []
        if budget_bytes == AMPLE:
            assert not core.events(events.LeaseWaiting)
        core.context.gate.close()


def test_with_room_for_one_unit_only_the_others_wait_and_are_served(model_folder: Path, make_core: MakeCore) -> None:
    sections = {"batching": {"prefix_prompts": 1}, "data": {"prompts_per_iteration": len(ROWS)}}
    core = make_core(budget_bytes=minimum_bytes(model_folder, sections), **sections)
    step, inputs = core.begin(ROWS)
    step.run()
    assert core.events(events.LeaseWaiting)
    check_memory(core, inputs)


@pytest.mark.parametrize("kept", ["keep", "recompute"])
def test_what_a_prefix_kept_from_its_forward_on_is_off_the_books_when_it_lets_go_of_it(
    make_core: MakeCore, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its allocator does. Scratch of single units stays until the gate: the next unit takes it again."""
    trimmed: list[str] = []
    trim = Memory.trimmed

    def told(memory: Memory, owner: str, devices: Any = None) -> None:
        trimmed.append(owner)
        trim(memory, owner, devices)

    monkeypatch.setattr(Memory, "trimmed", told)
    sections = {"batching": {"prefix_prompts": 1, "suffix_prompts": 1}, "memory": {"prefix_activations": kept}}
    core = make_core(algorithm={"beta": 0.1}, run={"schedule": "overlap"}, **sections)
    step, inputs = core.begin(ROWS[:4])
    before = dict(core.memory.leased().private)[Role.PREFIX]  # what stands from LOAD on
    step.run()
    wants = (core.sizes.wants.backward_workspace(inputs.prompts[g : g + 1], g) for g in range(4))
    largest = max(0 if want is None else want.size_bytes for want in wants)
    assert dict(core.memory.leased().private)[Role.PREFIX] - before == largest
    assert (largest > 0) == (kept == "recompute")
    assert trimmed.count(Role.PREFIX) == (4 if kept == "recompute" else 8), "references, and actors that kept something"


# --- versions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "end"), [(1, 0), (0, 1), (1, 1)])
def test_a_group_with_a_token_of_another_version_ends_the_step(make_core: MakeCore, start: int, end: int) -> None:
    core = make_core()
    honest = core.workers.answers[GenerateUnit]

    def stale(m: GenerateUnit) -> list[Any]:
        answers = honest(m)
        third = [answer for answer in answers if isinstance(answer, GroupFinished)][2]
        answers[answers.index(third)] = replace(third, version_start=start, version_end=end)
        return answers

    core.workers.answers[GenerateUnit] = stale
    step, _ = core.begin(ROWS[:4])
    with pytest.raises(StateError, match=f"from version {start} to {end}; needed tokens of version 0 alone"):
        step.run()
    assert len(core.sent(RewardGroup)) == 2, "the group must not go on"


def test_a_group_that_comes_twice_ends_the_step(make_core: MakeCore) -> None:
    core = make_core()
    honest = core.workers.answers[GenerateUnit]
    core.workers.answers[GenerateUnit] = lambda m: [a for a in honest(m) if isinstance(a, GroupFinished)][:1] * 2
    step, _ = core.begin(ROWS[:4])
    with pytest.raises(StateError, match="needed each group once"):
        step.run()


# --- rewards ------------------------------------------------------------------------------------------------------


def failing(core: Core, problem: RewardProblem, *groups: int) -> None:
    """Rewards of these groups fail."""
    fine = core.workers.rewarded
    core.workers.answers[RewardGroup] = lambda m: [
        reward_failed(m, problem) if m.responses.group in groups else fine(m)
    ]


@pytest.mark.parametrize("problem", list(RewardProblem))
def test_a_failed_reward_ends_the_run_by_default_and_names_function_group_and_row(
    make_core: MakeCore, problem: RewardProblem
) -> None:
    core = make_core()
    failing(core, problem, 2)
    step, _ = core.begin(ROWS[:4])
    with pytest.raises(RewardError, match=f"group 2, row {ROWS[2]}: reward function moody .*not to my taste"):
        step.run()
    assert not core.sent(TrainSuffix)


@pytest.mark.parametrize("problem", list(RewardProblem))
def test_by_policy_a_failed_group_is_left_out_with_nan_and_never_with_0(
    make_core: MakeCore, problem: RewardProblem
) -> None:
    core = make_core(rewards={"on_error": "skip_group"}, algorithm={"scale_rewards": "batch"})
    failing(core, problem, 1, 3)
    step, inputs = core.begin(ROWS[:4])
    done = step.run()
    assert sorted(done.skipped) == [1, 3]
    (m,) = core.sent(TrainSuffix)
    rewards = [struct.unpack("<3d", blob) for blob in m.rewards]
    assert [all(map(math.isnan, values)) for values in rewards] == [False, True, False, True]
    assert not any(math.isnan(value) for group in (0, 2) for value in rewards[group])
    assert m.batch_rewards == b"".join(m.rewards)
    skipped = {event.group: event for event in core.events(events.GroupSkipped)}
    assert {group: (e.row, e.function, e.problem) for group, e in skipped.items()} == {
        group: (ROWS[group], "moody", problem) for group in (1, 3)
    }
    check_memory(core, inputs)


def test_mean_and_spread_of_a_group_leave_abstentions_out(make_core: MakeCore) -> None:
    core = make_core()
    nan = float("nan")
    blobs = [doubles(1.0, nan, 0.0), doubles(nan, nan, nan), doubles(0.5, nan, nan), doubles(1.0, 2.0, 3.0)]
    fine = core.workers.rewarded
    core.workers.answers[RewardGroup] = lambda m: [replace(fine(m), rewards=blobs[m.responses.group])]
    step, _ = core.begin(ROWS[:4])
    step.run()
    found = {event.group: (event.mean, event.std) for event in core.events(events.GroupRewarded)}
    assert found[0] == (0.5, pytest.approx(math.sqrt(0.5)))
    assert found[1] == (None, None)
    assert found[2] == (0.5, 0.0)
    assert found[3] == (2.0, 1.0)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_a_function_that_hung_costs_its_own_group_alone_and_each_group_is_asked_for_once(
    seed: int, model_folder: Path, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    sections = {"data": {"prompts_per_iteration": len(ROWS)}, "batching": {"decode_prompts": rng.choice([0, 2])}}
    config = make_config(model_folder, rewards={"on_error": "skip_group"}, run={"schedule": "stream"}, **sections)
    with Core(config, tmp_path, rng) as core:
        hung = rng.sample(range(len(ROWS)), rng.randint(1, 3))
        failing(core, RewardProblem.TIMED_OUT, *hung)
        step, inputs = core.begin(ROWS)
        done = step.run()
        assert sorted(done.skipped) == sorted(hung)
        assert sorted(m.responses.group for m in core.sent(RewardGroup)) == list(range(len(ROWS)))
        check_memory(core, inputs)


def test_rewards_that_are_all_equal_have_a_spread_of_exactly_0_and_large_ones_keep_theirs(make_core: MakeCore) -> None:
    core = make_core()
    equal, other = doubles(0.9, 0.9, 0.9), doubles(0.1, 0.1, 0.1)
    blobs = [equal, other, doubles(1e8, 1e8 + 0.1, 1e8 + 0.2), doubles(1e18, -1e18, 0)]
    fine = core.workers.rewarded
    core.workers.answers[RewardGroup] = lambda m: [replace(fine(m), rewards=blobs[m.responses.group])]
    step, _ = core.begin(ROWS[:4])
    step.run()
    found = {event.group: (event.mean, event.std) for event in core.events(events.GroupRewarded)}
    assert found[0] == (pytest.approx(0.9, rel=1e-15), 0.0)
    assert found[1] == (pytest.approx(0.1, rel=1e-15), 0.0)
    assert found[2] == (pytest.approx(1e8 + 0.1, rel=1e-15), pytest.approx(0.1, rel=1e-6))
    assert found[3] == (0.0, 1e18)
