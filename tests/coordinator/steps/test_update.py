"""The update: what is on disk before what is sent, whatever order answers come in; failed votes; stops."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rollplex.errors import RewardError, StateError, UpdateError
from rollplex.journal import events
from rollplex.journal.phases import Phase
from rollplex.protocol.common import CachesDropped, Committed, Drain, Role
from rollplex.protocol.trainer import ApplyUpdate, KeepGradients, PrepareUpdate, SkipUpdate, UpdateApplied, UpdateVote
from rollplex_coordinator.processes.stop import StopRun
from rollplex_coordinator.steps.update import Update
from support.core import Core, make_config
from support.workers import DIGEST, Stuck

MakeCore = Callable[..., Core]
ROWS = (4, 9, 14, 2)
READERS = {Role.PREFIX, Role.ROLLOUT}


def trained(core: Core, step: int = 0) -> Core:
    """A step of which every gradient is there; the story begins with its update."""
    run, inputs = core.begin(ROWS, step)
    run.run()
    core.context.feed.done(inputs)
    core.story.clear()
    return core


def place(core: Core, kind: type[Any], role: Role | None = None) -> int:
    """Where in the story a message was sent, or a durable event came on disk. Exactly one."""
    (found,) = [
        index
        for index, entry in enumerate(core.story)
        if isinstance(entry[-1], kind) and (role is None or entry[1] is role)
    ]
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_begin_is_on_disk_before_the_weights_move_and_commit_before_a_reader_is_told(
    seed: int, model_folder: Path, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    with Core(make_config(model_folder), tmp_path, rng) as core:
        trained(core)
        update = Update(core.context)
        assert update.run()
        assert update.metrics == {"loss": 0.5}
        prepare, begin, apply = place(core, PrepareUpdate), place(core, events.UpdateBegin), place(core, ApplyUpdate)
        commit = place(core, events.UpdateCommitted)
        drains = [place(core, Drain, role) for role in READERS]
        told = [place(core, Committed, role) for role in READERS]
        assert max(prepare, *drains) < begin < apply < commit < min(told)
        assert len(core.story) == 8, "nothing else"
        (begun,), (committed,) = core.events(events.UpdateBegin), core.events(events.UpdateCommitted)
        assert (begun.step, begun.version) == (0, 0)
        assert (committed.step, committed.version, committed.digest) == (0, 1, DIGEST)
        assert committed.start_s < committed.end_s
        assert {m.version for m in core.sent(Drain)} == {0}
        assert {m.version for m in core.sent(Committed)} == {1}
        assert (core.record.version, core.record.phase, core.context.gate.version) == (1, Phase.UPDATE, 1)
        assert core.ledger.phase is Phase.UPDATE
        assert core.context.gate.may_read


def test_gradients_are_kept_between_the_vote_and_the_update_if_they_are_asked_for(make_core: MakeCore) -> None:
    core = trained(make_core(run={"keep_gradients": True}))
    assert Update(core.context).run()
    assert place(core, PrepareUpdate) < place(core, KeepGradients) < place(core, ApplyUpdate)
    (kept,) = core.sent(KeepGradients)
    assert Path(kept.file) == core.context.run_dir / "gradients" / "step_0.bin"


@pytest.mark.parametrize(
    ("role", "silent"),
    [(Role.PREFIX, Drain), (Role.ROLLOUT, Drain), (Role.TRAINER, PrepareUpdate)],
    ids=["prefix", "rollout", "trainer"],
)
def test_begin_waits_for_the_vote_and_for_every_reader(make_core: MakeCore, role: Role, silent: type[Any]) -> None:
    core = trained(make_core())
    core.hub.silence(role, silent)
    with pytest.raises(Stuck):
        Update(core.context).run()
    assert not core.events(events.UpdateBegin)
    assert [wait.peer for wait in core.link.waits.open] == [str(core.hub.peers[role])]


@pytest.mark.parametrize("role", sorted(READERS))
def test_the_gate_opens_when_the_last_reader_has_dropped_its_caches(make_core: MakeCore, role: Role) -> None:
    core = trained(make_core())
    core.hub.silence(role, Committed)
    with pytest.raises(Stuck):
        Update(core.context).run()
    assert core.events(events.UpdateCommitted)
    assert not core.context.gate.may_read


def test_nothing_is_committed_that_was_applied_to_another_version(make_core: MakeCore) -> None:
    core = trained(make_core())
    honest = core.workers.answers[ApplyUpdate]
    core.workers.answers[ApplyUpdate] = lambda m: [replace(honest(m)[0], version=7)]
    with pytest.raises(StateError, match="applied version 7"):
        Update(core.context).run()
    assert core.events(events.UpdateBegin)
    assert not core.events(events.UpdateCommitted)
    assert not core.sent(Committed)


def test_a_reader_that_sees_another_version_after_the_commit_ends_the_run(make_core: MakeCore) -> None:
    core = trained(make_core())
    core.workers.answers[Committed] = lambda m: [CachesDropped(cause=m.cause, version=0)]
    with pytest.raises(StateError, match="caches_dropped .* at version 0"):
        Update(core.context).run()


# --- failed votes -------------------------------------------------------------------------------------------------


def vote(core: Core, *, finite: bool, **metrics: float) -> None:
    core.workers.answers[PrepareUpdate] = lambda m: [
        UpdateVote(cause=m.cause, step=m.step, finite=finite, start_s=0.0, end_s=0.5, metrics=metrics)
    ]


def test_after_a_failed_vote_nothing_is_begun_and_readers_go_on_at_the_old_version(make_core: MakeCore) -> None:
    core = trained(make_core())
    vote(core, finite=False, groups=4.0, groups_skipped=0.0)
    assert not Update(core.context).run()
    assert not core.events(events.UpdateBegin)
    assert not core.sent(ApplyUpdate)
    (skip,), (skipped,) = core.sent(SkipUpdate), core.events(events.UpdateSkipped)
    assert (skip.step, skipped.step, skipped.version) == (0, 0, 0)
    assert skipped.reason == "a gradient or the loss is not finite"
    assert {m.version for m in core.sent(Committed)} == {0}
    assert place(core, SkipUpdate) < min(place(core, Committed, role) for role in READERS)
    assert (core.record.version, core.context.gate.step) == (0, 1)


def failing(core: Core) -> None:
    """Steps whose votes fail, until the gate has enough."""
    for step in range(3):
        trained(core, step)
        Update(core.context).run()


def test_the_third_failed_vote_in_a_row_ends_the_run(make_core: MakeCore) -> None:
    core = make_core()
    vote(core, finite=False, groups=4.0, groups_skipped=1.0)
    with pytest.raises(UpdateError, match="not finite again and again; got 3 failed votes"):
        failing(core)
    assert len(core.events(events.UpdateSkipped)) == 3


def test_steps_without_any_reward_are_called_so(make_core: MakeCore) -> None:
    core = make_core()
    vote(core, finite=False, groups=4.0, groups_skipped=4.0)
    with pytest.raises(RewardError, match="every group of the step was left out again and again"):
        failing(core)
    assert {event.reason for event in core.events(events.UpdateSkipped)} == {"every group of the step was left out"}


# --- stops --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "updates"), [(PrepareUpdate, 0), (ApplyUpdate, 1), (Committed, 1)], ids=["vote", "step", "commit"]
)
def test_a_stop_waits_from_begin_to_commit_and_not_longer(make_core: MakeCore, moment: type[Any], updates: int) -> None:
    core = trained(make_core())
    answer = core.workers.answers[moment]

    def stop(m: Any) -> list[Any]:
        core.link.stop(StopRun(source="SIGINT", exit_code=130))
        return answer(m)

    core.workers.answers[moment] = stop
    with pytest.raises(StopRun, match="SIGINT"):
        Update(core.context).run()
    assert len(core.events(events.UpdateBegin)) == len(core.events(events.UpdateCommitted)) == updates


def test_a_trainer_that_fails_between_begin_and_commit_leaves_begin_alone(make_core: MakeCore) -> None:
    core = trained(make_core())
    applied = core.workers.answers[ApplyUpdate]
    core.workers.answers[ApplyUpdate] = lambda m: [replace(applied(m)[0], digest="")]
    with pytest.raises(StateError, match="needed a digest"):
        Update(core.context).run()
    assert [type(entry[-1]) for entry in core.story if entry[0] == "durable"] == [events.UpdateBegin]
    assert UpdateApplied not in {type(entry[-1]) for entry in core.story}
