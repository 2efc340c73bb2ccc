"""Steps on several devices: who is told what, with which device's memory; and what the gate waits for."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rollplex.errors import StateError
from rollplex.journal import events
from rollplex.presets import TINY_WIDE, write_preset
from rollplex.protocol.common import Committed, Drain, LeaseRef, Memory, Role, SegmentRef
from rollplex.protocol.prefix import PrefixBackward, PrefixForward, ScoreSuffix
from rollplex.protocol.rollout import GenerateUnit
from rollplex.protocol.trainer import (
    ApplyUpdate,
    KeepGradients,
    PrepareUpdate,
    Publish,
    SaveCheckpoint,
    SkipUpdate,
    TrainSuffix,
)
from rollplex_coordinator.decisions.digests import combined
from rollplex_coordinator.processes.hub import Peer
from rollplex_coordinator.steps.checkpointing import Checkpoints
from rollplex_coordinator.steps.evaluate import Evaluation
from rollplex_coordinator.steps.iteration import Iteration
from rollplex_coordinator.steps.update import Update
from support.core import AMPLE, Core, make_config
from support.workers import DIGEST, Stuck, named

ROWS = (4, 9, 14, 2)
LAYOUTS: dict[str, dict[str, Any]] = {
    "4x1/2x2": {"training": 4, "rollout": 2},
    "2x2/1x4": {"training": 2, "rollout": 1},
    "1x4/2x2": {"training": 1, "rollout": 2},
    "2x1/1x2 apart": {"training": 2, "rollout": 1, "placement": "disaggregated", "rollout_devices": 2},
}
MakeWide = Callable[..., Core]


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset(TINY_WIDE.name, tmp_path_factory.mktemp("wide"))


@pytest.fixture
def make_wide(wide_folder: Path, tmp_path: Path) -> Iterator[MakeWide]:
    """make_wide("2x2/1x4", seed=1, run={...}): a core of four devices."""
    with ExitStack() as stack:

        def make(layout: str, seed: int = 0, **sections: Any) -> Core:
            return stack.enter_context(core_of(wide_folder, tmp_path, layout, seed, **sections))

        yield make


def core_of(folder: Path, run_dir: Path, layout: str, seed: int, **sections: Any) -> Core:
    sections = {"parallel": {"devices": 4, **LAYOUTS[layout]}, **sections}
    return Core(make_config(folder, **sections), run_dir, random.Random(seed), AMPLE)


def watched(core: Core) -> list[tuple[Peer, Any]]:
    """Everything that is sent from now on; leases and segments that a message names are on its receiver's device."""
    sent: list[tuple[Peer, Any]] = []
    send = core.hub.send

    def check(peer: Peer, message: Any) -> None:
        leases = {lease.id: lease for place in core.memory.view().devices for lease in place.leases}
        for ref in named(message, LeaseRef):
            assert leases[ref.lease].device == peer.device, message
        for segment in named(message, SegmentRef):
            held = core.holder.find(segment.segment)
            assert held is not None
            if held.ref.kind != "inputs":
                assert leases[held.lease].device == peer.device, message
        sent.append((peer, message))
        send(peer, message)

    core.hub.send = check  # type: ignore[method-assign]
    return sent


def told(sent: list[tuple[Peer, Any]], kind: type[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Devices that were told of a unit, in order, by `key` of the message."""
    found: dict[Any, list[Any]] = {}
    for peer, message in sent:
        if isinstance(message, kind):
            found.setdefault(key(message), []).append(peer.device)
    return found


@pytest.mark.parametrize("schedule", ["serial", "overlap", "stream"])
@pytest.mark.parametrize(
    ("layout", "engine"),
    [*((layout, "transformers") for layout in sorted(LAYOUTS)), ("4x1/2x2", "sglang"), ("2x1/1x2 apart", "sglang")],
)
def test_on_gpus_a_step_s_segments_lie_on_the_gpu_of_their_device_and_nothing_of_it_stays(
    make_wide: MakeWide, layout: str, engine: str, schedule: str
) -> None:
    core = make_wide(
        layout,
        run={"schedule": schedule},
        device={"kind": "cuda"},
        model={"dtype": "bfloat16"},
        rollout={"engine": engine, "group_size": 3, "max_new_tokens": 6},
    )
    sent, places = watched(core), set[tuple[int, Memory]]()
    send = core.hub.send

    def check(peer: Peer, message: Any) -> None:
        for segment in named(message, SegmentRef):
            held = core.holder.find(segment.segment)
            assert held is not None
            assert held.ref.memory is (Memory.HOST if held.ref.kind == "inputs" else Memory.CUDA)
            if held.ref.memory is Memory.CUDA:
                assert held.device == peer.device, message
            places.add((held.device.index, held.ref.memory))
        send(peer, message)

    core.hub.send = check  # type: ignore[method-assign]
    run, inputs = core.begin(ROWS)
    run.run()
    core.context.feed.done(inputs)
    assert not core.leased
    trained = {device.index for device in core.fleet.training_devices}
    assert {index for index, memory in places if memory is Memory.CUDA} == trained
    for device, driver in core.gpus.items():
        assert (driver.calls.count("cuMemCreate") > 0) == (device.index in trained)
    assert [type(message) for _, message in sent].count(GenerateUnit) > 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    schedule=st.sampled_from(["serial", "overlap", "stream"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_rank_of_a_units_team_is_told_once_with_its_own_devices_memory(
    layout: str, schedule: str, seed: int, wide_folder: Path, tmp_path: Path
) -> None:
    batching = {"decode_prompts": 1, "prefix_prompts": 1, "suffix_prompts": 1}
    with core_of(wide_folder, tmp_path, layout, seed, run={"schedule": schedule}, batching=batching) as core:
        sent = watched(core)
        run, inputs = core.begin(ROWS)
        run.run()
        core.context.feed.done(inputs)
        assert not core.leased
        fleet, plan = core.fleet, core.plan(len(ROWS))
        engines = {unit: list(fleet.engines[plan.engine_of(unit)].devices) for unit in range(4)}
        prefixes = {unit: list(fleet.prefixes[plan.replica_of(unit)].devices) for unit in range(4)}
        trainers = {unit: list(fleet.trainers[plan.replica_of(unit)].devices) for unit in range(4)}
        assert told(sent, GenerateUnit, lambda m: m.unit) == engines
        for which in ("actor", "reference"):
            forwards = [(peer, m) for peer, m in sent if isinstance(m, PrefixForward) and m.which == which]
            assert told(forwards, PrefixForward, lambda m: m.unit) == prefixes
        assert told(sent, ScoreSuffix, lambda m: m.suffix_unit) == prefixes
        assert told(sent, PrefixBackward, lambda m: m.unit) == prefixes
        assert told(sent, TrainSuffix, lambda m: m.suffix_unit) == trainers


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_the_version_is_committed_when_every_device_has_it_and_readers_are_told_after(
    make_wide: MakeWide, layout: str
) -> None:
    core = make_wide(layout, 3)
    run, inputs = core.begin(ROWS)
    run.run()
    core.context.feed.done(inputs)
    core.story.clear()
    sent = watched(core)
    update = Update(core.context)
    assert update.run()
    order = [type(entry[-1]) for entry in core.story]
    steps = [PrepareUpdate, Drain, events.UpdateBegin, ApplyUpdate, Publish, events.UpdateCommitted, Committed]
    for before, after in itertools.pairwise(steps):
        last = max(n for n, kind in enumerate(order) if kind is before)
        assert before is PrepareUpdate or last < order.index(after), (before, after)
    training = list(core.fleet.training_devices)
    kind: type[Any]
    for kind in (PrepareUpdate, ApplyUpdate, Publish):
        assert told(sent, kind, type) == {kind: training}
    readers = [team for team in core.fleet.workers if team.role is not Role.TRAINER]
    places = sorted((team.role, device) for team in readers for device in team.devices)
    for kind in (Drain, Committed):
        assert sorted((peer.role, peer.device) for peer, m in sent if isinstance(m, kind)) == places
    (committed,) = core.events(events.UpdateCommitted)
    assert (committed.refreshed_bytes, committed.rebuilt_bytes) == (30 * len(training), 4 * len(training))
    assert committed.digest == combined(dict.fromkeys(training, DIGEST))
    assert committed.end_s < committed.published_s
    assert update.metrics["refreshed_bytes"] == 30.0 * len(training)
    assert update.publish_s is not None
    assert update.publish_s > 0.0
    assert core.context.gate.may_read


@pytest.mark.parametrize(
    ("role", "silent", "begun", "committed"),
    [
        (Role.TRAINER, PrepareUpdate, 0, 0),
        (Role.PREFIX, Drain, 0, 0),
        (Role.ROLLOUT, Drain, 0, 0),
        (Role.TRAINER, ApplyUpdate, 1, 0),
        (Role.TRAINER, Publish, 1, 0),
        (Role.ROLLOUT, Committed, 1, 1),
    ],
)
def test_the_gate_waits_for_the_last_process_of_a_role(
    make_wide: MakeWide, role: Role, silent: type[Any], begun: int, committed: int
) -> None:
    core = make_wide("2x2/1x4")
    run, _ = core.begin(ROWS)
    run.run()
    answer = core.workers.answers[silent]
    count = len(core.fleet.devices_of(role))
    asked = iter(range(count))
    send = core.hub.send

    def but_for_the_last(peer: Peer, message: Any) -> None:
        mine = peer.role is role and isinstance(message, silent)
        core.workers.answers[silent] = (lambda _: []) if mine and next(asked) == count - 1 else answer
        send(peer, message)

    core.hub.send = but_for_the_last  # type: ignore[method-assign]
    with pytest.raises(Stuck):
        Update(core.context).run()
    assert len(core.events(events.UpdateBegin)) == begun
    assert len(core.events(events.UpdateCommitted)) == committed
    (wait,) = core.link.waits.open
    assert wait.peer.startswith(str(role))
    assert not core.context.gate.may_read


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("question", [Drain, Committed])
def test_a_reader_at_another_version_ends_the_run_whichever_device_it_is_on(
    make_wide: MakeWide, question: type[Any], which: int
) -> None:
    core = make_wide("1x4/2x2")
    run, _ = core.begin(ROWS)
    run.run()
    send, honest, asked = core.hub.send, core.workers.answers[question], iter(range(4))

    def other(peer: Peer, message: Any) -> None:
        wrong = peer.role is Role.PREFIX and isinstance(message, question) and next(asked) == which
        core.workers.answers[question] = (lambda m: [replace(honest(m)[0], version=9)]) if wrong else honest
        send(peer, message)

    core.hub.send = other  # type: ignore[method-assign]
    with pytest.raises(StateError, match="prefix at version 9"):
        Update(core.context).run()
    assert not core.context.gate.may_read


def test_replicas_that_do_not_vote_alike_end_the_run(make_wide: MakeWide) -> None:
    core = make_wide("1x4/2x2")
    run, _ = core.begin(ROWS)
    run.run()
    honest = core.workers.answers[PrepareUpdate]
    asked = iter(range(4))
    core.workers.answers[PrepareUpdate] = lambda m: [
        replace(answer, metrics={"loss": 0.5 + (next(asked) == 2)}) for answer in honest(m)
    ]
    with pytest.raises(StateError, match=r"the replicas disagree about step 0: loss; got 0.5 from trainer\[0:0\], 1.5"):
        Update(core.context).run()
    assert not core.events(events.UpdateBegin)


def test_replicas_that_have_stepped_to_different_weights_end_the_run_before_anybody_reads_them(
    make_wide: MakeWide,
) -> None:
    core = make_wide("1x4/2x2")
    run, _ = core.begin(ROWS)
    run.run()
    honest = core.workers.answers[Publish]
    digests = iter(("a" * 64, "b" * 64, "a" * 64, "c" * 64))  # two places in the plan, two devices each
    core.workers.answers[Publish] = lambda m: [replace(answer, digest=next(digests)) for answer in honest(m)]
    with pytest.raises(StateError, match=r"Replicas have different weights; got digest c+ on device .*needed b+"):
        Update(core.context).run()
    assert core.events(events.UpdateBegin)
    assert not core.events(events.UpdateCommitted)
    assert not core.sent(Committed)


def test_a_step_that_is_not_finite_is_skipped_by_every_trainer(make_wide: MakeWide) -> None:
    core = make_wide("2x2/1x4")
    run, _ = core.begin(ROWS)
    run.run()
    honest = core.workers.answers[PrepareUpdate]
    core.workers.answers[PrepareUpdate] = lambda m: [replace(answer, finite=False) for answer in honest(m)]
    sent = watched(core)
    assert not Update(core.context).run()
    assert told(sent, SkipUpdate, lambda m: m.step) == {0: list(core.fleet.training_devices)}
    assert not [m for _, m in sent if isinstance(m, Publish)]
    assert len(core.events(events.UpdateSkipped)) == 1


def test_the_first_trainer_alone_writes_gradients_and_checkpoints(make_wide: MakeWide) -> None:
    core = make_wide("2x2/1x4", run={"keep_gradients": True})
    sent = watched(core)
    core.record.step = 0
    Iteration(core.context, step=0, rows=ROWS, ahead=None).run()
    Checkpoints(core.context).save()
    first = core.fleet.trainers[0].leader
    assert told(sent, KeepGradients, lambda m: m.step) == {0: [first]}
    assert told(sent, SaveCheckpoint, lambda m: m.step) == {1: [first]}


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_metrics_say_how_long_each_device_was_idle_and_how_long_copying_took(make_wide: MakeWide, layout: str) -> None:
    core = make_wide(layout)
    core.record.step = 0
    row: dict[str, Any] = Iteration(core.context, step=0, rows=ROWS, ahead=None).run()
    for device in range(4):
        assert row[f"time/idle/0:{device}_s"] >= 0.0
    assert row["time/publish_s"] > 0.0
    votes = [unit for unit in core.events(events.UnitDone) if unit.kind is events.UnitKind.VOTE]
    assert sorted(unit.service for unit in votes) == sorted(f"trainer[{team.leader}]" for team in core.fleet.trainers)


def test_an_evaluation_shares_its_rows_out_among_the_engines(make_wide: MakeWide) -> None:
    core = make_wide("4x1/2x2", eval=[{"name": "held_out", "data": "other.jsonl", "limit": 7}])
    core.record.version = 0
    sent = watched(core)
    means = Evaluation(core.context, core.context.config.eval[0]).run()
    assert means["count"] == 7.0
    rows = {m.unit: tuple(slot.row for slot in m.prompts) for _, m in sent if isinstance(m, GenerateUnit)}
    assert rows == {0: (0, 1), 1: (2, 3), 2: (4, 5), 3: (6,)}
    engines = [list(team.devices) for team in core.fleet.engines]
    assert told(sent, GenerateUnit, lambda m: m.unit) == {0: engines[0], 1: engines[1], 2: engines[0], 3: engines[1]}
    assert not core.leased
