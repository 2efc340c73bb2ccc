"""A coordinator's real sockets in this process, and workers of threads at their other end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq

from rollplex.memory.segment import backend
from rollplex.protocol.claim import claim
from rollplex.protocol.common import Device, Role
from rollplex.protocol.handshake import Welcome, encode_handshake, identity
from rollplex.worker.connection import connect_stream
from rollplex.worker.messages import MessageThread
from rollplex.worker.options import WorkerOptions
from rollplex_coordinator.decisions.fleet import SINGLE, Fleet
from rollplex_coordinator.memory.holder import Holder
from rollplex_coordinator.processes.hub import Hub
from rollplex_coordinator.processes.link import Link

DEADLINE_S = 10.0
ACK_S = 100.0
WELCOME = Welcome(run_id="test-run", alive_every_s=0.05, received_within_s=5.0, grace_s=2.0)


WorkerT = TypeVar("WorkerT", "Worker", "DeafWorker")


class Clock:
    """CLOCK_MONOTONIC from 0, which the test can put forward."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self._start_s

    def forward(self, seconds: float) -> None:
        """So much time passes at once."""
        self._start_s -= seconds


class FakeSupervisor:
    """Says how children ended: `ends[role]` of the first device, `ends[role, device]` of others."""

    def __init__(self) -> None:
        self.ends: dict[Role | tuple[Role, Device], str] = {}

    def exit_text(self, role: Role, device: Device = Device()) -> str:  # noqa: B008 - immutable
        return self.ends.get(role if device == Device() else (role, device), "")

    def log_text(self, role: Role, device: Device = Device()) -> str:  # noqa: B008 - immutable
        return f"/run/logs/{role}.log" if device == Device() else f"/run/logs/{role}-{device.index}.log"


@contextmanager
def open_hub(run_dir: Path, roles: Iterable[Role], welcome: Welcome = WELCOME, fleet: Fleet = SINGLE) -> Iterator[Hub]:
    """The sockets of a run directory, where the workers of each role are expected as incarnation 1."""
    with claim(run_dir, welcome.run_id) as held:
        holder = Holder(backend("host"))
        hub = Hub(held.run_dir, held.secret, welcome, holder)
        for role in roles:
            for device in fleet.devices_of(role):
                hub.expect(role, device, 1, exact=True)
        try:
            yield hub
        finally:
            hub.close()
            holder.close_all()


class Worker:
    """One worker: its stream and its message thread. The test is its main thread."""

    def __init__(
        self,
        run_dir: Path,
        role: Role,
        incarnation: int = 1,
        device: Device = Device(),  # noqa: B008 - immutable
    ) -> None:
        options = WorkerOptions(
            role=role, run_dir=run_dir, device=device, incarnation=incarnation, connect_deadline_s=DEADLINE_S
        )
        found, self.stream, hello, welcome = connect_stream(options)
        self.messages = MessageThread(found.control_endpoint, hello, welcome.alive_every_s)
        self.messages.starting = False
        self.messages.start()

    def next(self) -> Any:
        """The next instruction."""
        return self.messages.inbox.get(timeout=DEADLINE_S)

    def send(self, message: Any) -> None:
        """Queue a message."""
        self.messages.send(message)

    def die(self) -> None:
        """The stream ends, as it does when the process does; the message socket goes on for what was sent."""
        self.stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Send what is queued, then end."""
        self.messages.stop()
        self.stream.close()


class DeafWorker:
    """Joins, and then neither reads nor says anything."""

    def __init__(self, run_dir: Path, role: Role) -> None:
        options = WorkerOptions(
            role=role, run_dir=run_dir, device=Device(), incarnation=1, connect_deadline_s=DEADLINE_S
        )
        found, self.stream, hello, _ = connect_stream(options)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.IDENTITY, identity(role, Device(), 1))
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.connect(found.control_endpoint)
        self._dealer.send(encode_handshake(hello))

    def close(self) -> None:
        """Close everything at once, as the kernel does for a dead process."""
        self._dealer.close()
        self._context.term()
        self.stream.close()


class Site:
    """A link over real sockets, and the workers that joined it.

    Args:
        clock: of the link.
        fleet: who can join.
    """

    def __init__(self, run_dir: Path, hub: Hub, clock: Clock, fleet: Fleet = SINGLE) -> None:
        self.run_dir, self.hub, self.clock = run_dir, hub, clock
        self.supervisor = FakeSupervisor()
        self.link = Link(hub, self.supervisor, ACK_S, clock=clock, fleet=fleet)  # type: ignore[arg-type] # has what Link asks it
        self._workers: list[Worker | DeafWorker] = []
        self._pool = ThreadPoolExecutor()

    def join(self, role: Role, incarnation: int = 1) -> Worker:
        """A worker connects while the link turns."""
        return self._join(role, lambda: Worker(self.run_dir, role, incarnation))

    def join_all(self, role: Role) -> list[Worker]:
        """All workers of a role connect while the link turns; by device."""
        coming = [
            self._pool.submit(Worker, self.run_dir, role, 1, device) for device in self.link.fleet.devices_of(role)
        ]
        self.link.await_peers([role], DEADLINE_S)
        workers = [one.result(DEADLINE_S) for one in coming]
        self._workers += workers
        return workers

    def join_deaf(self, role: Role) -> DeafWorker:
        """The same, of the deaf kind."""
        return self._join(role, lambda: DeafWorker(self.run_dir, role))

    def _join(self, role: Role, make: Callable[[], WorkerT]) -> WorkerT:
        coming = self._pool.submit(make)
        self.link.await_peers([role], DEADLINE_S)
        worker = coming.result(DEADLINE_S)
        self._workers.append(worker)
        return worker

    def turn(self) -> None:
        """One turn of the loop."""
        turns: list[None] = []
        self.link.after_turn = lambda: turns.append(None)
        self.link.pump(lambda: bool(turns))

    def soon(self, action: Any) -> None:
        """Do something in a moment, while the link turns."""
        timer = threading.Timer(0.05, action)
        timer.daemon = True
        timer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        for worker in self._workers:
            worker.close()
