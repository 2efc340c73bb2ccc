"""The core's side of the control API: called from another thread, answered by the loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rollplex.config.job import DeviceSection
from rollplex.errors import StateError, WaitError
from rollplex.journal import events
from rollplex.journal.events import StopWhen
from rollplex.journal.phases import Phase
from rollplex.journal.reader import Reader
from rollplex.nvml import Gpu
from rollplex.protocol.claim import claim
from rollplex.protocol.common import DigestReply, DigestRequest, Drain, Drained, Held, Kind, Role
from rollplex_coordinator.control import CoreControl
from rollplex_coordinator.decisions.fleet import DEVICE, WORKERS
from rollplex_coordinator.decisions.gate import Gate
from rollplex_coordinator.decisions.ledger import Ledger
from rollplex_coordinator.decisions.work import Work
from rollplex_coordinator.memory.leasing import Memory, Want
from rollplex_coordinator.options import Options
from rollplex_coordinator.processes.gpus import open_gpus
from rollplex_coordinator.processes.node import Node
from rollplex_coordinator.processes.stop import Signals, StopRun
from support.core import make_config
from support.fake_nvml import FakeNvml
from support.sockets import DEADLINE_S, Worker

ResultT = TypeVar("ResultT")
UNIT_S = 60.0


class Desk:
    """A node whose workers are threads of this process, and its control."""

    def __init__(self, node: Node, stack: ExitStack) -> None:
        self.node = node
        self.work = Work(0, serve=True)
        self.control = CoreControl(node, self.work)
        node.link.after_turn = self.control.turn
        self._stack = stack
        self.pool = stack.enter_context(ThreadPoolExecutor())
        self.workers: dict[Role, Worker] = {}

    def join(self) -> None:
        """All three workers come."""
        for role in WORKERS:
            self.node.start(role)
            coming = self.pool.submit(Worker, self.node.run_dir, role)
            self.node.link.await_peers([role], DEADLINE_S)
            self.workers[role] = coming.result(DEADLINE_S)
            self._stack.callback(self.workers[role].close)

    def load(self) -> Gate:
        """The models are loaded: there are a gate and a memory."""
        self.control.gate = Gate()
        ledger = Ledger({DEVICE: 100_000})
        self.control.memory = Memory(ledger, self.node.holder, self.node.record, DEVICE)
        self.control.memory.enter(Phase.ROLLOUT)
        return self.control.gate

    def ask(self, call: Callable[[], ResultT]) -> ResultT:
        """Call from another thread while the loop turns here."""
        result = self.pool.submit(call)
        self.node.link.pump(result.done)
        return result.result()

    def turns(self, count: int) -> None:
        """So many turns of the loop."""
        left = iter(range(2 * count))
        self.node.link.pump(lambda: next(left, None) is None)


@pytest.fixture
def desk(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Desk]:
    """parametrized: with that section `parallel`."""
    monkeypatch.setattr("rollplex_coordinator.processes.link.IDLE_TICK_S", 0.01)
    with ExitStack() as stack:
        run_dir = tmp_path / "run"
        claimed = stack.enter_context(claim(run_dir, "test-run"))
        read_fd, write_fd = os.pipe()
        stack.callback(os.close, read_fd)
        stack.callback(os.close, write_fd)
        options = Options(
            config=Path("c.yaml"),
            run_dir=run_dir,
            iterations=None,
            serve=True,
            external_workers=True,
            die_with_parent=False,
        )
        config = make_config(
            model_folder,
            deadlines={"unit_s": UNIT_S},
            run={"schedule": "stream"},
            parallel=getattr(request, "param", {}),
        )
        node = Node(claimed, "the-run", config, options, Signals(read_fd=read_fd, write_fd=write_fd, received=[]))
        stack.callback(node.record.close)
        stack.callback(node.holder.close_all)
        stack.callback(node.link.hub.close)
        stack.callback(node.mailbox.close)
        yield Desk(node, stack)


def journalled(desk: Desk) -> list[Any]:
    desk.node.record.journal.flush()
    with Reader(desk.node.run_dir / "journal.sqlite") as reader:
        return [record.event for record in reader.events_after(0, 1000)]


# --- requests -----------------------------------------------------------------------------------------------------


def test_starting_iterations_is_noted_and_status_tells_it(desk: Desk) -> None:
    view = desk.ask(lambda: desk.control.start(3))
    assert (view.run, view.phase, view.schedule) == ("the-run", "IDLE", "stream")
    assert (view.iterations_wanted, view.iterations_done, view.step, view.stopping) == (3, 0, 0, None)
    assert desk.work.iterate


def test_stopping_after_the_iteration_is_journalled_and_ends_or_waits(desk: Desk) -> None:
    desk.ask(lambda: desk.control.start(3))
    view = desk.ask(lambda: desk.control.stop(when=StopWhen.AFTER_ITERATION, exit=False))
    assert (view.iterations_wanted, view.stopping) == (0, None)
    desk.ask(lambda: desk.control.start(1))
    view = desk.ask(lambda: desk.control.stop(when=StopWhen.AFTER_ITERATION, exit=True))
    assert view.stopping is StopWhen.AFTER_ITERATION
    with pytest.raises(StateError, match="stopping"):
        desk.ask(lambda: desk.control.start(1))
    with pytest.raises(StateError, match="stopping"):
        desk.ask(desk.control.checkpoint)
    stops = [e for e in journalled(desk) if isinstance(e, events.StopRequested)]
    assert [(e.when, e.exit, e.source) for e in stops] == [
        (StopWhen.AFTER_ITERATION, False, "http"),
        (StopWhen.AFTER_ITERATION, True, "http"),
    ]


def test_stopping_now_answers_and_then_ends_the_loop(desk: Desk) -> None:
    answer = desk.pool.submit(lambda: desk.control.stop(when=StopWhen.NOW, exit=True))
    with pytest.raises(StopRun, match="http") as caught:
        desk.node.link.pump(lambda: False)
    assert caught.value.exit_code == 0
    assert answer.result(DEADLINE_S).stopping is StopWhen.NOW


def test_an_iteration_that_is_given_up_cannot_be_followed_by_another(desk: Desk) -> None:
    with pytest.raises(StateError, match="given up now"):
        desk.ask(lambda: desk.control.stop(when=StopWhen.NOW, exit=False))
    desk.turns(3)


def test_a_checkpoint_is_noted(desk: Desk) -> None:
    desk.ask(desk.control.checkpoint)
    assert desk.work.checkpoint_wanted


# --- questions ----------------------------------------------------------------------------------------------------


def test_status_tells_what_is_awaited_from_whom_since_when(desk: Desk) -> None:
    desk.join()
    desk.node.record.step, desk.node.record.version = 4, 4
    desk.node.record.enter(Phase.TRAIN)
    desk.node.link.ask(Role.TRAINER, lambda cause: DigestRequest(cause=cause), "train groups 0-3", 50.0)
    desk.node.link.ask(Role.PREFIX, lambda cause: DigestRequest(cause=cause), "prefix backward", 60.0)
    view = desk.ask(desk.control.status)
    assert (view.phase, view.step, view.version) == ("TRAIN", 4, 4)
    assert [(w.awaited, w.source) for w in view.waiting] == [
        ("train groups 0-3", "trainer[0:0]"),
        ("prefix backward", "prefix[0:0]"),
    ]
    assert [w.deadline_s for w in view.waiting] == pytest.approx([50.0, 60.0])
    assert all(w.age_s >= 0 and w.since_wall_s > view.started_wall_s - 60 for w in view.waiting)


def test_services_are_starting_ready_busy_or_dead(desk: Desk) -> None:
    assert {view.role: view.state for view in desk.ask(desk.control.services)} == dict.fromkeys(Role, "starting")
    desk.join()
    desk.node.link.ask(Role.TRAINER, lambda cause: DigestRequest(cause=cause), "train groups 0-3", 50.0)
    views = {view.role: view for view in desk.ask(desk.control.services)}
    assert (views[Role.TRAINER].state, views[Role.TRAINER].busy_with) == ("busy", "train groups 0-3")
    assert (views[Role.ROLLOUT].state, views[Role.ROLLOUT].busy_with) == ("ready", "")
    assert views[Role.ROLLOUT].service == "rollout[0:0]"
    assert (views[Role.ROLLOUT].pid, views[Role.ROLLOUT].incarnation) == (os.getpid(), 1)
    assert views[Role.INPUT].state == "starting"
    desk.node.link.pump(lambda: desk.node.link.heard_s(Role.PREFIX) is not None)
    heard = {view.role: view.heard_age_s for view in desk.ask(desk.control.services)}
    age_s = heard[Role.PREFIX]
    assert age_s is not None
    assert age_s >= 0
    assert heard[Role.INPUT] is None
    health = {part.name: (part.ok, part.detail) for part in desk.ask(desk.control.health).parts}
    assert health["trainer[0:0]"] == (True, "busy")
    assert health["input[0:0]"] == (False, "starting")


@pytest.mark.parametrize("desk", [{"devices": 2}], indirect=True)
def test_of_several_devices_each_process_is_a_service(desk: Desk) -> None:
    views = desk.ask(desk.control.services)
    assert [view.service for view in views] == [
        *(f"{role}[0:{index}]" for role in ("trainer", "prefix", "rollout") for index in (0, 1)),
        "input[0:0]",
        "reward[0:0]",
    ]
    assert [view.device for view in views[:2]] == ["0:0", "0:1"]


def test_a_dead_child_is_told_apart(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk.node.supervisor, "exit_text", lambda role, _: "exit code 1" if role is Role.INPUT else "")
    states = {view.role: view.state for view in desk.ask(desk.control.services)}
    assert (states[Role.INPUT], states[Role.REWARD]) == ("dead", "starting")


def want(size_bytes: int, purpose: str, **changes: Any) -> Want:
    given: dict[str, Any] = {
        "kind": Kind.ACTOR_PREFIX_KV,
        "owner": Role.PREFIX,
        "last_consumer": Role.TRAINER,
        "first": Phase.ROLLOUT,
        "last": Phase.TRAIN,
    }
    return Want(size_bytes=size_bytes, purpose=purpose, **{**given, **changes})


def test_the_ledger_shows_leases_with_what_is_held_and_what_waits(desk: Desk) -> None:
    assert desk.ask(desk.control.ledger).devices == ()
    desk.load()
    memory = desk.control.memory
    assert memory is not None
    shared, private = memory.now(want(40_000, "a segment", segment=True)), memory.now(want(30_000, "private"))
    memory.measured((Held(lease=private.lease, size_bytes=29_000),))
    memory.when_free((want(50_000, "patient"),), lambda _: None)
    view = desk.ask(desk.control.ledger)
    (device,) = view.devices
    assert (device.budget_bytes, device.leased_bytes, device.peak_bytes) == (100_000, 70_000, 70_000)
    leases = {lease.purpose: lease for lease in view.leases}
    assert (leases["a segment"].segment, leases["a segment"].held_bytes) == (shared.ref.segment, None)
    assert (leases["private"].segment, leases["private"].held_bytes) == (None, 29_000)
    assert (leases["private"].owner, leases["private"].last_consumer) == (Role.PREFIX, Role.TRAINER)
    assert leases["private"].age_s >= 0
    assert [(w.purpose, w.size_bytes, w.owner) for w in view.waiting] == [("patient", 50_000, Role.PREFIX)]


def test_history_comes_from_the_journal_also_what_is_not_flushed_yet(desk: Desk, tmp_path: Path) -> None:
    record = desk.node.record
    for step in (0, 1):
        record.append(events.IterationStarted(step=step, version=step, rows=(5, 6)))
    record.append(events.IterationDone(step=0, version=1, metrics={"loss": 0.25}))
    there, gone = tmp_path / "there", tmp_path / "gone"
    there.mkdir()
    for folder in (there, gone):
        record.append_durable(events.CheckpointSaved(step=1, version=1, folder=str(folder), size_bytes=7))
    record.append(events.IterationStarted(step=2, version=2, rows=(7,)))
    views = desk.ask(lambda: desk.control.iterations(1, 10))
    assert [(view.step, view.rows) for view in views] == [(1, (5, 6)), (2, (7,))]
    assert [view.step for view in desk.ask(lambda: desk.control.iterations(0, 1))] == [0]
    first = desk.ask(lambda: desk.control.iteration(0))
    assert first is not None
    assert first.metrics["loss"] == 0.25
    assert desk.ask(lambda: desk.control.iteration(9)) is None
    (checkpoint,) = desk.ask(desk.control.checkpoints)
    assert (checkpoint.step, checkpoint.folder, checkpoint.size_bytes) == (1, str(there), 7)


# --- digests ------------------------------------------------------------------------------------------------------


def answer_digests(worker: Worker, *digests: str) -> None:
    for digest in digests:
        message = worker.next()
        assert isinstance(message, DigestRequest)
        worker.send(DigestReply(cause=message.cause, version=2, digest=digest))


def test_digests_before_the_models_are_loaded_are_refused(desk: Desk) -> None:
    desk.join()
    with pytest.raises(StateError, match="not loaded yet"):
        desk.ask(desk.control.digests)


def test_every_process_that_maps_the_weights_digests_them(desk: Desk) -> None:
    desk.join()
    desk.load()
    for role, worker in desk.workers.items():
        desk.pool.submit(answer_digests, worker, f"by {role}")
    view = desk.ask(desk.control.digests)
    assert {(d.service, d.version, d.digest) for d in view.digests} == {
        (f"{role}[0:0]", 2, f"by {role}") for role in WORKERS
    }


def test_two_requests_for_digests_get_answers_of_their_own(desk: Desk) -> None:
    desk.join()
    desk.load()
    both = [desk.pool.submit(desk.control.digests) for _ in range(2)]
    for worker in desk.workers.values():
        desk.pool.submit(answer_digests, worker, "answer 0", "answer 1")
    desk.node.link.pump(lambda: all(each.done() for each in both))
    assert {tuple({d.digest for d in each.result().digests}) for each in both} == {("answer 0",), ("answer 1",)}


def test_nobody_is_asked_to_digest_while_an_update_changes_the_weights(desk: Desk) -> None:
    desk.join()
    gate = desk.load()
    gate.register_reader(Role.PREFIX, on_policy=True)
    gate.begin_step(0, 1, [[0]])
    gate.group_sampled(0, 0, 0)
    gate.group_trained(0)
    gate.prefix_backward_done(0)
    gate.close()
    wanted = desk.pool.submit(desk.control.digests)
    desk.node.link.on(Drained, lambda *_: None)
    desk.node.link.ask(Role.PREFIX, lambda cause: Drain(cause=cause, version=0), "drain", UNIT_S)
    drain = desk.workers[Role.PREFIX].next()
    assert isinstance(drain, Drain)
    desk.turns(10)
    assert all(worker.messages.inbox.empty() for worker in desk.workers.values())
    gate.reader_drained(Role.PREFIX, 0)
    gate.voted(finite=True)
    gate.begun_durable()
    gate.applied(1, "d")
    gate.committed_durable()
    desk.turns(10)
    assert all(worker.messages.inbox.empty() for worker in desk.workers.values())
    gate.caches_dropped(Role.PREFIX, 1)
    for role, worker in desk.workers.items():
        desk.pool.submit(answer_digests, worker, str(role))
    desk.workers[Role.PREFIX].send(Drained(cause=drain.cause, version=0))
    desk.node.link.pump(wanted.done)
    assert len(wanted.result().digests) == 3


def test_a_caller_whose_digests_never_come_gets_an_error(desk: Desk) -> None:
    desk.join()
    desk.load()
    config = desk.node.config
    desk.node.config = config.model_copy(update={"deadlines": config.deadlines.model_copy(update={"unit_s": 0.3})})
    with pytest.raises(WaitError):
        desk.ask(desk.control.digests)


@pytest.mark.parametrize(("desk", "count"), [({}, 1), ({"devices": 2}, 2)], indirect=["desk"])
def test_the_status_of_a_run_on_gpus_says_which_and_how_they_are_shared_and_used(
    desk: Desk, tmp_path: Path, count: int
) -> None:
    before = desk.ask(desk.control.status)
    assert (before.gpu, before.gpus) == (None, ())
    config = desk.node.config.model_copy(update={"device": DeviceSection(kind="cuda", sharing="turns")})
    nvml = FakeNvml(total=2**30, used=2**20, count=count)
    desk.node.gpus = open_gpus(config, tmp_path, desk.node.fleet.devices, lambda index: Gpu(nvml, index))
    desk.load()
    assert desk.control.memory is not None
    shown = desk.ask(desk.control.status)
    names = [f"GPU {n} (NVIDIA H200, driver 580.159)" for n in range(count)]
    assert [(gpu.name, gpu.sharing_asked, gpu.used_bytes) for gpu in shown.gpus] == [(n, "turns", None) for n in names]
    assert [gpu.device for gpu in shown.gpus] == ["0:0", "0:1"][:count]
    assert shown.gpu == shown.gpus[0]
    desk.node.observe(desk.control.memory, 2**30)
    assert desk.node.observers is not None
    nvml.used_by = {n: 2**20 + 4096 * (n + 1) for n in range(count)}
    desk.node.observers.loaded()
    shown = desk.ask(desk.control.status)
    desk.node.observers.close()
    assert [(gpu.used_bytes, gpu.overhead_bytes, gpu.total_bytes) for gpu in shown.gpus] == [
        (4096 * (n + 1), 4096 * (n + 1), 2**30) for n in range(count)
    ]
