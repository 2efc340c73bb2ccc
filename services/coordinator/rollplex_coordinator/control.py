"""The core's side of the control API: every call runs in the core's thread, by way of the mailbox.

Owns the views of the live run. What a request changes is `Work`'s; history comes from the journal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from rollplex.errors import StateError
from rollplex.journal.events import CheckpointSaved, StopRequested, StopWhen
from rollplex.journal.reader import Reader
from rollplex.protocol.common import Device, DigestReply, DigestRequest, Role
from rollplex_coordinator.decisions.fleet import WORKERS
from rollplex_coordinator.decisions.gate import Gate
from rollplex_coordinator.decisions.leases import LedgerView as Books
from rollplex_coordinator.decisions.restarts import Restarts
from rollplex_coordinator.decisions.swap import Swap, Swaps
from rollplex_coordinator.decisions.work import Work
from rollplex_coordinator.http.history import iteration_view
from rollplex_coordinator.http.views import (
    BudgetView,
    CheckpointView,
    DigestsView,
    DigestView,
    GpuView,
    HealthPart,
    HealthView,
    IterationView,
    LeaseRequestView,
    LeaseView,
    LedgerView,
    RestartView,
    ServiceView,
    StatusView,
    SwapView,
    TrackerView,
    WaitView,
)
from rollplex_coordinator.memory.leasing import Memory
from rollplex_coordinator.memory.observer import Observer
from rollplex_coordinator.processes.device import GpuDevice
from rollplex_coordinator.processes.hub import Peer
from rollplex_coordinator.processes.node import CHILDREN, Node
from rollplex_coordinator.processes.stop import StopRun

HTTP = "http"
CALL_S = 10.0
HEALTH_S = 2.0


class CoreControl:
    """Implements `http.control.Control`. `memory` and `gate` are set once the node has got so far, `swaps`,
    `begin_swap` and `restarts` by whoever replaces services."""

    def __init__(self, node: Node, work: Work) -> None:
        self.memory: Memory | None = None
        self.gate: Gate | None = None
        self._node = node
        self._work = work
        self._started_wall_s = time.time()
        self._digests_wanted: list[Future[DigestsView]] = []
        self.swaps: Swaps | None = None
        self.begin_swap: Callable[[Role, Sequence[str]], Swap] | None = None
        self.restarts: Restarts | None = None
        self._digests: dict[Future[DigestsView], dict[int, DigestView | None]] = {}
        node.link.on(DigestReply, self._on_digest)

    # --- requests -------------------------------------------------------------------------------------------------

    def start(self, count: int) -> StatusView:
        def do() -> StatusView:
            self._work.start(count)
            return self._status()

        return self._node.mailbox.call(do, f"start {count} iterations", CALL_S)

    def stop(self, *, when: StopWhen, exit: bool) -> StatusView:  # noqa: A002 - the API's word
        def do() -> StatusView:
            if when is StopWhen.NOW and not exit:
                raise StateError(
                    "an iteration that is given up now cannot be followed by another in this run",
                    got="when: now, exit: false",
                    needed="exit: true, or when: after_iteration",
                )
            self._node.record.append(StopRequested(when=when, exit=exit, source=HTTP))
            if when is StopWhen.NOW:
                self._work.stopping = StopWhen.NOW
                self._node.link.stop(StopRun(source=HTTP, exit_code=0))
            else:
                self._work.stop_after_iteration(end=exit)
            return self._status()

        return self._node.mailbox.call(do, f"stop {when}", CALL_S)

    def checkpoint(self) -> StatusView:
        def do() -> StatusView:
            if self._work.stopping is not None:
                raise StateError("the run is stopping", got="a request for a checkpoint", needed="a run that goes on")
            self._work.checkpoint_wanted = True
            return self._status()

        return self._node.mailbox.call(do, "request a checkpoint", CALL_S)

    def swap(self, role: Role, command: tuple[str, ...]) -> SwapView:
        def do() -> SwapView:
            if self.begin_swap is None or self.gate is None:
                raise StateError(
                    "the services have not loaded yet", got=f"a replacement of {role}", needed="a loaded node"
                )
            return _swap_view(self.begin_swap(role, command))

        return self._node.mailbox.call(do, f"replace {role}", CALL_S)

    def digests(self) -> DigestsView:
        return self._node.mailbox.call_later(
            self._ask_digests, "digest the weights", self._node.config.deadlines.unit_s
        )

    # --- questions ------------------------------------------------------------------------------------------------

    def status(self) -> StatusView:
        return self._node.mailbox.call(self._status, "status", CALL_S)

    def services(self) -> tuple[ServiceView, ...]:
        return self._node.mailbox.call(self._services, "services", CALL_S)

    def ledger(self) -> LedgerView:
        return self._node.mailbox.call(self._ledger, "ledger", CALL_S)

    def health(self) -> HealthView:
        return self._node.mailbox.call(self._health, "health", HEALTH_S)

    def iterations(self, first: int, limit: int) -> tuple[IterationView, ...]:
        self._flush()
        with Reader(self._journal_path) as reader:
            views = [iteration_view(reader.events_of_step(step)) for step in reader.steps(first, limit)]
        return tuple(view for view in views if view is not None)

    def iteration(self, step: int) -> IterationView | None:
        self._flush()
        with Reader(self._journal_path) as reader:
            return iteration_view(reader.events_of_step(step))

    def checkpoints(self) -> tuple[CheckpointView, ...]:
        self._flush()
        with Reader(self._journal_path) as reader:
            records = reader.events_of_type(CheckpointSaved)
        return tuple(
            CheckpointView(
                step=event.step,
                version=event.version,
                folder=event.folder,
                size_bytes=event.size_bytes,
                saved_wall_s=record.wall_s,
            )
            for record in records
            if isinstance(event := record.event, CheckpointSaved) and Path(event.folder).is_dir()
        )

    # --- in the core's thread -------------------------------------------------------------------------------------

    def look(self) -> tuple[StatusView, tuple[BudgetView, ...], tuple[ServiceView, ...]]:
        """What the terminal shows. In the core's thread only."""
        return self._status(), () if self.memory is None else self._devices(self.memory.view()), self._services()

    @property
    def _journal_path(self) -> Path:
        return self._node.record.journal.path

    def _flush(self) -> None:
        self._node.mailbox.call(self._node.record.journal.flush, "flush the journal", CALL_S)

    def _status(self) -> StatusView:
        now, wall = time.monotonic(), time.time()
        record, gpus = self._node.record, self._gpus()
        waits = [
            WaitView(
                awaited=wait.what,
                source=wait.peer,
                age_s=max(0.0, now - wait.since_s),
                since_wall_s=wall - (now - wait.since_s),
                deadline_s=max(0.0, wait.due_s - wait.since_s),
            )
            for wait in self._node.link.waits.open
        ]
        return StatusView(
            run=self._node.run_id,
            phase=record.phase.name,
            step=record.step if record.step is not None else self._work.done,
            version=record.version,
            iterations_wanted=self._work.wanted,
            iterations_done=self._work.done,
            schedule=self._node.config.run.schedule,
            stopping=self._work.stopping,
            started_wall_s=self._started_wall_s,
            waiting=tuple(waits),
            gpu=next(iter(gpus), None),
            gpus=gpus,
            restarts=0 if self.restarts is None else self.restarts.made,
            restart=None if self.restarts is None else _restart_view(self.restarts),
            swap=None if self.swaps is None or self.swaps.newest is None else _swap_view(self.swaps.newest),
            trackers=tuple(
                TrackerView(name=item.name, state=item.state, detail=item.detail, dropped_rows=item.dropped_rows)
                for item in record.trackers
            ),
        )

    def _gpus(self) -> tuple[GpuView, ...]:
        gpus, observers = self._node.gpus, self._node.observers
        if gpus is None:
            return ()
        watched = {} if observers is None else observers.on
        return tuple(_gpu_view(device, one, watched.get(device)) for device, one in gpus.devices.items())

    def _services(self) -> tuple[ServiceView, ...]:
        fleet = self._node.fleet
        places = [(role, device) for role in (*WORKERS, *CHILDREN) for device in fleet.devices_of(role)]
        return tuple(self._service(role, device) for role, device in places)

    def _service(self, role: Role, device: Device) -> ServiceView:
        link = self._node.link
        peer = link.peer(role, device)
        child = self._node.supervisor.child(role, device)
        busy = [wait.what for wait in link.waits.open if peer is not None and wait.peer == str(peer)]
        state = "starting" if peer is None else "busy" if busy else "ready"
        if self._node.supervisor.exit_text(role, device):
            state = "dead"
        heard = link.heard_s(role, device)
        return ServiceView(
            service=f"{role}[{device}]",
            role=role,
            device=str(device),
            incarnation=peer.incarnation if peer else child.incarnation if child else 0,
            pid=child.pid if child else peer.pid if peer else 0,
            state=state,  # type: ignore[arg-type] # one of the literals above
            busy_with=busy[0] if busy else "",
            heard_age_s=None if heard is None else max(0.0, time.monotonic() - heard),
            log_path=str(child.log_path) if child else "",
            command=self._node.supervisor.command(role) if child else (),
            since_wall_s=self._node.joined_wall_s.get(self._node.fleet.name(role, device)),
        )

    def _ledger(self) -> LedgerView:
        if self.memory is None:
            return LedgerView(devices=(), leases=())
        view = self.memory.view()
        leases = tuple(
            LeaseView(
                lease=lease.id,
                kind=lease.kind,
                owner=lease.producer,
                device=str(lease.device),
                size_bytes=lease.size_bytes,
                held_bytes=self.memory.held_bytes(lease.id),
                segment=self.memory.segment_of(lease.id),
                last_consumer=lease.last_consumer,
                purpose=lease.purpose,
                age_s=self.memory.age_s(lease.id),
            )
            for d in view.devices
            for lease in d.leases
        )
        waiting = tuple(
            LeaseRequestView(
                kind=block.kind,
                owner=block.producer,
                device=str(block.device),
                size_bytes=block.size_bytes,
                purpose=block.purpose,
            )
            for d in view.devices
            for pending in d.waiting
            for block in pending.blocks
        )
        return LedgerView(devices=self._devices(view), leases=leases, waiting=waiting)

    def _devices(self, view: Books) -> tuple[BudgetView, ...]:
        return tuple(
            BudgetView(
                device=str(d.device),
                budget_bytes=d.budget_bytes,
                leased_bytes=d.held_bytes,
                reserved_bytes=d.reserved_bytes,
                peak_bytes=max(d.peak_bytes.values(), default=0),
            )
            for d in view.devices
        )

    def _health(self) -> HealthView:
        parts = [
            HealthPart(name=view.service, ok=view.state in {"ready", "busy"}, detail=view.state)
            for view in self._services()
        ]
        return HealthView(parts=tuple(parts))

    # --- digests --------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """After each turn of the core's loop: what had to wait for an open gate."""
        if self._digests_wanted and self.gate is not None and self.gate.may_read:
            for future in self._digests_wanted:
                self._send_digests(future)
            self._digests_wanted.clear()

    def lost(self) -> None:
        """The workers have ended: who waits for their digests gets those of the new ones."""
        self._digests_wanted += list(self._digests)
        self._digests.clear()

    @property
    def digesting(self) -> bool:
        """Some process has been asked for its digest by a request, and has not answered."""
        return bool(self._digests)

    def _ask_digests(self, future: Future[DigestsView]) -> None:
        if self.gate is None:
            raise StateError("the weights are not loaded yet", got="a request for digests", needed="a loaded node")
        self._digests_wanted.append(future)

    def _send_digests(self, future: Future[DigestsView]) -> None:
        """The gate is open: requests reach every process before its next Drain, so nobody digests a changing weight."""
        answers: dict[int, DigestView | None] = {}

        def make(cause: int, _rank: int) -> DigestRequest:
            answers[cause] = None
            return DigestRequest(cause=cause)

        for team in self._node.fleet.workers:
            self._node.link.ask_team(team, make, "digest the weights", self._node.config.deadlines.unit_s)
        self._digests[future] = answers

    def _on_digest(self, peer: Peer, message: DigestReply) -> None:
        for future, answers in list(self._digests.items()):
            if message.cause in answers:
                answers[message.cause] = DigestView(service=str(peer), version=message.version, digest=message.digest)
                views = [view for view in answers.values() if view is not None]
                if len(views) == len(answers):
                    del self._digests[future]
                    if not future.done():
                        future.set_result(DigestsView(digests=tuple(views)))


def _gpu_view(device: Device, one: GpuDevice, observer: Observer | None) -> GpuView:
    return GpuView(
        device=str(device),
        name=str(one.gpu.info),
        sharing_asked=one.sharing.asked,
        sharing_used=one.sharing.used,
        why=one.sharing.why,
        total_bytes=one.gpu.info.total_bytes,
        used_bytes=None if observer is None else observer.used_bytes(),
        overhead_bytes=None if observer is None else observer.overhead_bytes,
    )


def _restart_view(restarts: Restarts) -> RestartView | None:
    newest = restarts.newest
    if newest is None:
        return None
    return RestartView(
        number=newest.number,
        allowed=restarts.allowed,
        service=newest.service,
        how=newest.how,
        phase=newest.phase,
        step=newest.step,
        wall_s=newest.wall_s,
        state="done" if newest.done else "under way",
    )


def _swap_view(swap: Swap) -> SwapView:
    return SwapView(
        role=swap.role,
        command=swap.command,
        state=swap.stage.value,
        case=swap.case,
        got=swap.got,
        needed=swap.needed,
        step=swap.step,
    )
