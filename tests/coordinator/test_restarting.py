"""Restarts without processes: an end at every single moment of an iteration, and what is left, asked and written."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rollplex.config import wire
from rollplex.errors import DataError, RollplexError, WaitError
from rollplex.journal import events
from rollplex.journal.phases import Phase
from rollplex.protocol.common import Device, ErrorReport, Kind, Loaded, Role
from rollplex.protocol.inputs import PrepareInputs
from rollplex.protocol.prefix import LoadPrefix
from rollplex.protocol.reward import RewardGroup
from rollplex.protocol.rollout import LoadRollout
from rollplex.protocol.trainer import LoadTrainer, Standing
from rollplex_coordinator.control import CoreControl
from rollplex_coordinator.decisions.gate import State
from rollplex_coordinator.decisions.work import Work
from rollplex_coordinator.processes.hub import Event, Peer
from rollplex_coordinator.processes.link import WorkerDied, WorkerFailed
from rollplex_coordinator.processes.mps import MpsError
from rollplex_coordinator.processes.supervisor import NotEndedError
from rollplex_coordinator.restarting import Restarting, end_of
from rollplex_coordinator.steps.evaluate import Evaluation
from rollplex_coordinator.steps.iteration import Iteration
from rollplex_coordinator.steps.loads import Loads
from rollplex_coordinator.steps.segments import StandingSegments
from support.core import Core, make_config
from support.workers import DIGEST, FakeHub, doubles

ROWS = (4, 9)
SECTIONS: dict[str, Any] = {
    "rollout": {"group_size": 2, "max_new_tokens": 4, "forced_lengths": [1, 2, 3, 4]},
    "data": {"prompts_per_iteration": 2},
    "batching": {"decode_prompts": 1, "prefix_prompts": 2, "suffix_prompts": 1},
}


def died(role: Role = Role.ROLLOUT) -> WorkerDied:
    return WorkerDied(f"the {role} service died", role=role, got="killed by SIGKILL", needed="", do="", where=f"{role}")


class Mortal:
    """Lets the hub speak `moments` times, and raises an end then, once; later ones are given by `more`."""

    def __init__(self, hub: FakeHub) -> None:
        self._poll = hub.poll
        self.left: int | None = None
        self.end: RollplexError = died()
        hub.poll = self.poll  # type: ignore[method-assign] # in front of it

    def poll(self, timeout_s: float) -> list[Event]:
        if self.left == 0:
            self.left = None
            raise self.end
        if self.left is not None:
            self.left -= 1
        return self._poll(timeout_s)


class FakeNode:
    """What `restarting` needs of a node, over workers without processes."""

    external_workers = False
    gpus = observers = None

    def __init__(self, core: Core) -> None:
        self.core = core
        self.config, self.run_dir = core.context.config, core.context.run_dir
        self.link, self.record, self.fleet = core.link, core.record, core.fleet
        self.supervisor: Any = core.link._supervisor
        self.loads: dict[Role, Any] = {}
        self.run_id = "run"
        self.incarnation = 1
        self.refuses: list[RollplexError] = []
        """What the next starts end in."""
        self.staying: list[str] = []
        """Who has not ended when all should."""

    def end_workers(self) -> None:
        self.incarnation += 1
        if self.staying:
            raise NotEndedError.of(self.staying)
        self.link.forget_workers()

    def start(self, role: Role) -> None:
        if self.refuses:
            raise self.refuses.pop(0)
        for device in self.fleet.devices_of(role):
            self.core.hub.come(role, device, self.incarnation)


class World:
    """A loaded core that can restart."""

    def __init__(self, folder: Path, run_dir: Path, **sections: Any) -> None:
        self.found = ""
        """The digest that a new trainer tells instead of what it is told."""
        sections = {**SECTIONS, **sections}
        config = make_config(folder, **sections)
        core = self.core = Core(config, run_dir, random.Random(0))
        for kind in (LoadTrainer, LoadPrefix, LoadRollout):
            core.workers.answers[kind] = lambda m: [
                Loaded(
                    cause=m.cause,
                    table_bytes=core.sizes.segments_of(m.parallel).actor,
                    digest=self.found or (m.standing.digest if isinstance(m, LoadTrainer) and m.standing else ""),
                )
            ]
        plain = core.workers.rewarded
        core.workers.answers[RewardGroup] = lambda m: [
            type(plain(m))(
                cause=m.cause,
                step=m.step,
                group=m.responses.group,
                rewards=doubles(*(m.row / 8.0, 0.5)[: len(m.responses.lengths)]),
                by_function=(doubles(*(m.row / 8.0, 0.5)[: len(m.responses.lengths)]),),
                texts=("a", "b")[: len(m.responses.lengths)],
                start_s=0.0,
                end_s=0.0,
            )
        ]
        c = self.context = core.context
        core.memory.enter(Phase.LOAD)
        segments = StandingSegments(core.memory, core.sizes, core.fleet, reference=True)
        core.memory.enter(Phase.IDLE)
        core.standing |= core.leased
        c.loads = Loads(
            config,
            spec=wire.model_spec(config, table_hash=core.sizes.table.hash, never_sampled=(1, 2)),
            engine=wire.engine_spec(config, max_prompt_tokens=99),
            segments=segments,
            caps={},
            restore=None,
            meets={},
        )
        c.digests = dict.fromkeys(core.fleet.training_devices, "first")
        self.node = FakeNode(core)
        node: Any = self.node
        self.control = CoreControl(node, Work(1, serve=False))
        self.restarting = Restarting(node, self.control)
        self.mortal = Mortal(core.hub)

    def iterate(self, step: int = 0) -> dict[str, Any]:
        self.core.record.step = step
        iteration = Iteration(self.context, step=step, rows=ROWS, ahead=ROWS)
        return timeless(self.restarting.attempt(self.context, iteration.run))

    def begun(self) -> list[events.WorkersRestarting]:
        return self.core.events(events.WorkersRestarting)


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith("time/")}


@pytest.fixture
def world(model_folder: Path, tmp_path: Path) -> Iterator[World]:
    made = World(model_folder, tmp_path)
    with made.core:
        yield made


@pytest.mark.parametrize(
    "sections",
    [
        {"run": {"schedule": "serial", "restarts": 999}},
        {"run": {"schedule": "stream", "restarts": 999}},
        {"run": {"restarts": 999}, "parallel": {"devices": 2, "training": 2, "rollout": 2}},
    ],
    ids=["serial", "stream", "two devices"],
)
def test_an_end_at_any_moment_of_an_iteration_changes_nothing_of_what_it_is_worth(
    model_folder: Path, tmp_path: Path, sections: dict[str, Any]
) -> None:
    worlds = (World(model_folder, tmp_path, **sections) for _ in range(99))
    plain = next(worlds)
    with plain.core:
        rows = [plain.iterate(0)]
        moments = plain.core.hub.arrived
        rows += [plain.iterate(step) for step in range(1, moments)]
    assert moments > 20
    served, ended, moment = 0, 0, 0
    while moment < moments:
        world = next(worlds)
        with world.core as core:
            for step in range(moments):
                if moment == moments:
                    break
                world.mortal.left = moment
                moment += 1
                try:
                    assert world.iterate(step) == rows[step]
                except WorkerDied:
                    assert core.context.gate.state is State.APPLYING
                    ended += 1
                    break
                served += world.mortal.left is None
                world.mortal.left = None
                assert len(core.leased) <= 1, "but the next step's inputs"
                assert core.context.gate.state is State.OPEN
                assert core.context.gate.step == step + 1
            committed = [event.version for event in core.events(events.UpdateCommitted)]
            assert committed == list(range(1, len(committed) + 1))
            assert len(core.events(events.IterationDone)) == len(committed)
            assert len(world.begun()) == len(core.events(events.WorkersRestarted))
    assert moments - 4 <= served + ended <= moments, "the next step's inputs come early or late"
    assert 1 <= ended <= 8, "from BEGIN to COMMIT"


def test_an_end_at_any_moment_of_an_evaluation_changes_nothing_of_it_and_takes_no_more_memory_than_is_planned(
    model_folder: Path, tmp_path: Path
) -> None:
    world = World(
        model_folder,
        tmp_path,
        run={"restarts": 999},
        parallel={"devices": 2, "training": 2, "rollout": 2},
        eval=[{"name": "held_out", "data": "other.jsonl", "limit": 10}],
    )
    with world.core as core:
        c = core.context
        honest, bound = core.workers.answers[PrepareInputs], core.sizes.bounds(core.data)[Kind.INPUTS]
        core.workers.answers[PrepareInputs] = lambda m: [replace(honest(m)[0], size_bytes=bound)]
        c.feed.prepare_step(0, ROWS)
        ahead = c.feed.take(0)

        def evaluate() -> dict[str, float]:
            return world.restarting.attempt(c, lambda: Evaluation(c, c.config.eval[0]).run())

        plain = evaluate()
        moments = 0
        while world.mortal.left is None:
            world.mortal.left = moments
            assert evaluate() == plain
            assert core.leased == {block.lease for block in ahead.block.blocks}, "but the next step's inputs"
            moments += 1
        assert moments > 40
        assert len(world.begun()) == len(core.events(events.WorkersRestarted)) == moments - 1
        assert len((c.run_dir / "eval.jsonl").read_text().splitlines()) == moments + 1


def test_new_workers_find_what_the_journal_has_last(world: World) -> None:
    world.iterate(0)
    world.mortal.left = 5
    world.iterate(1)
    trainer, prefix, rollout = (world.core.sent(kind) for kind in (LoadTrainer, LoadPrefix, LoadRollout))
    assert [m.standing for m in trainer] == [Standing(version=1, digest=DIGEST)]
    assert [m.restore for m in trainer] == [None]
    assert trainer[0].actor == prefix[0].actor == rollout[0].actor
    (restarted,) = world.core.events(events.WorkersRestarted)
    assert (restarted.version, restarted.digest, restarted.step) == (1, DIGEST, 1)


def test_who_ended_how_and_where_is_told_and_seen_in_the_status(world: World) -> None:
    world.mortal.left, world.mortal.end = 12, died(Role.PREFIX)
    world.iterate()
    (begun,) = world.begun()
    assert (begun.number, begun.allowed, begun.role, begun.step) == (1, 3, Role.PREFIX, 0)
    assert (begun.phase, begun.error.got) == ("ROLLOUT", "killed by SIGKILL")
    newest = world.restarting.restarts.newest
    assert newest is not None
    assert (newest.how, newest.done) == ("the prefix service died: killed by SIGKILL", True)


def test_when_none_is_left_the_first_error_of_the_row_is_raised_and_told_first(world: World) -> None:
    first, second, third = died(), died(Role.TRAINER), died(Role.PREFIX)
    world.restarting.restarts.allowed = 2
    world.mortal.left, world.mortal.end = 5, first
    world.node.refuses = [second, third]
    world.restarting._pause = lambda _: None  # type: ignore[method-assign, assignment] # nobody waits here
    with pytest.raises(WorkerDied) as caught:
        world.iterate()
    assert caught.value is first
    event, text = world.restarting.told(caught.value)
    assert (event.service, event.phase) == ("rollout", "ROLLOUT")
    lines = text.splitlines()
    assert "the rollout service died" in lines[0]
    assert "restart 1 of 2 failed: trainer: the trainer service died" in lines[-3]
    assert "restart 2 of 2 failed: prefix: the prefix service died" in lines[-2]
    assert "run.restarts is 2" in lines[-1]


def test_what_a_start_would_not_mend_ends_the_row_at_once(world: World) -> None:
    peer = Peer(role=Role.TRAINER, device=Device(), incarnation=2, pid=2)
    report = ErrorReport(kind="StaleWeightsError", what="other weights", got="digest a", needed="digest b")
    world.mortal.left = 5
    world.node.refuses = [WorkerFailed(peer, report)]
    with pytest.raises(WorkerDied) as caught:
        world.iterate()
    _, text = world.restarting.told(caught.value)
    assert "restart 1 of 3 failed: other weights; got digest a; needed digest b" in text
    assert len(world.begun()) == 1


def test_while_one_is_still_there_no_other_starts_and_nothing_of_it_comes_back(world: World) -> None:
    world.mortal.left, world.node.staying = 12, ["a process of rollout (pid 7)"]
    with pytest.raises(WorkerDied) as caught:
        world.iterate()
    left = world.core.leased
    assert not world.core.sent(LoadTrainer)
    owners = {event.owner for event in world.core.events(events.LeaseGranted) if event.lease in left}
    assert owners & {Role.ROLLOUT, Role.PREFIX, Role.TRAINER}
    _, text = world.restarting.told(caught.value)
    lines = text.splitlines()
    assert "the rollout service died" in lines[0]
    assert "restart 1 of 3 failed: Workers were killed and have not ended" in lines[-2]
    assert "got a process of rollout (pid 7)" in lines[-2]
    assert lines[-1] == "  the workers do not start again: the ones before them are still there"
    assert len(world.begun()) == 1


def test_a_trainer_that_did_not_find_the_weights_is_not_gone_on_with(world: World) -> None:
    world.mortal.left, world.found = 5, "others"
    with pytest.raises(WorkerDied) as caught:
        world.iterate()
    _, text = world.restarting.told(caught.value)
    assert "restart 1 of 3 failed: trainer: The new trainer has other weights than those of the last update" in text
    assert "got digest others; needed first, of version 0" in text


def test_without_a_digest_to_compare_nothing_is_trusted(world: World) -> None:
    world.context.digests = {Device(): ""}
    world.mortal.left = 5
    with pytest.raises(WorkerDied):
        world.iterate()
    assert not world.begun()


def test_the_end_of_another_process_is_that_of_the_run(world: World) -> None:
    world.mortal.left, world.mortal.end = 5, died(Role.REWARD)
    with pytest.raises(WorkerDied):
        world.iterate()
    assert not world.begun()


def test_workers_that_others_start_are_not_started_again(model_folder: Path, tmp_path: Path) -> None:
    world = World(model_folder, tmp_path)
    with world.core:
        world.node.external_workers = True
        node: Any = world.node
        world.restarting = Restarting(node, world.control)
        world.mortal.left = 5
        with pytest.raises(WorkerDied):
            world.iterate()


@pytest.mark.parametrize(
    ("error", "role", "kind"),
    [
        (died(Role.TRAINER), Role.TRAINER, "ServiceDied"),
        (WaitError("no answer", where="prefix[0:1]"), Role.PREFIX, "WaitError"),
        (
            WorkerFailed(
                Peer(role=Role.ROLLOUT, device=Device(), incarnation=1, pid=1), ErrorReport(kind="OSError", what="x")
            ),
            Role.ROLLOUT,
            "OSError",
        ),
        (MpsError("the MPS daemon ended"), None, "MpsError"),
    ],
    ids=lambda value: value.__class__.__name__,
)
def test_whose_end_an_error_tells(error: RollplexError, role: Role | None, kind: str) -> None:
    end = end_of(error)
    assert end is not None
    assert (end.role, end.kind) == (role, kind)


@pytest.mark.parametrize("error", [DataError("bad row"), WaitError("no answer", where="the journal")])
def test_another_error_is_nobody_s_end(error: RollplexError) -> None:
    assert end_of(error) is None
