"""What a node consists of while it is up: run directory, sockets, children, watchers, API. Made and unmade in order.

Owns construction and the orderly end. Knows nothing of iterations.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn

from rollplex.config.config import Config
from rollplex.config.host import memory_limit_bytes
from rollplex.errors import RollplexError
from rollplex.journal.events import DeviceReady, ServiceDied, ServiceStarted
from rollplex.journal.phases import Phase
from rollplex.memory.segment import backend
from rollplex.protocol.claim import Claim
from rollplex.protocol.common import Device, Role
from rollplex.protocol.handshake import Welcome
from rollplex_coordinator.decisions.fleet import DEVICE, WORKERS, Team, fleet_of
from rollplex_coordinator.memory.holder import Holder
from rollplex_coordinator.memory.leasing import Memory
from rollplex_coordinator.memory.observer import Observer
from rollplex_coordinator.memory.observers import Observers
from rollplex_coordinator.options import Options
from rollplex_coordinator.processes.device import GpuDevice
from rollplex_coordinator.processes.gpus import Gpus, open_gpus
from rollplex_coordinator.processes.hub import Hub, Peer
from rollplex_coordinator.processes.link import Link
from rollplex_coordinator.processes.mailbox import Mailbox
from rollplex_coordinator.processes.mps import Mps
from rollplex_coordinator.processes.stop import Signals, StopRun
from rollplex_coordinator.processes.supervisor import NotEndedError, Supervisor
from rollplex_coordinator.records.journal import Journal
from rollplex_coordinator.records.record import Record

CHILDREN = (Role.INPUT, Role.REWARD)
ALIVE_EVERY_S = 1.0
MEET = "meet"
"""How the names of files begin by which processes of a role find each other."""

log = logging.getLogger("rollplex.coordinator")


class Node:
    """One coordinator's belongings.

    Args:
        claim: the run directory, locked.
        config: resolved.
        signals: SIGINT and SIGTERM of this process.
    """

    def __init__(self, claim: Claim, run_id: str, config: Config, options: Options, signals: Signals) -> None:
        self.run_id = run_id
        self.run_dir = claim.run_dir.path
        self.config = config
        self.fleet = fleet_of(config)
        """Which workers there are, and on which devices."""
        self.gpus = open_gpus(config, self.run_dir, self.fleet.devices)  # before all else that is opened: it refuses
        """None on host memory."""
        journal = Journal(self.run_dir / "journal.sqlite")
        self.record = Record(self.run_dir, journal, tensorboard=config.run.tensorboard)
        self.holder = Holder(backend("host"))
        self.supervisor = Supervisor(self.run_dir, config.run.threads, commands(config), self.fleet)
        self.observers: Observers | None = None
        """Of the GPUs' memory, from LOAD on."""
        self.loads: dict[Role, tuple[Team, Callable[[int, int], Any]]] = {}
        """By role, from LOAD on: what has its first team load."""
        self.joined_wall_s: dict[str, float] = {}
        """By the name of a process, since when it takes part: seconds since 1970."""
        self._options = options
        self._starting: dict[str, float] = {}
        self._first_start_s = time.monotonic()
        welcome = Welcome(
            run_id=run_id,
            alive_every_s=ALIVE_EVERY_S,
            received_within_s=config.deadlines.ack_s,
            grace_s=config.deadlines.leave_s,
        )
        self.link = Link(
            Hub(claim.run_dir, claim.secret, welcome, self.holder),
            self.supervisor,
            config.deadlines.ack_s,
            fleet=self.fleet,
        )
        self.link.on_joined = self._joined
        self.link.on_gone = self._gone
        self.mailbox = Mailbox()
        self.link.watch(signals.read_fd, "signals", lambda: self.link.stop(signals.stop_asked()))
        self.link.watch(self.mailbox.fd, "mailbox", self.mailbox.serve)
        if options.die_with_parent:
            self.link.watch(os.pidfd_open(os.getppid()), "parent", self._parent_ended)

    @property
    def limit_bytes(self) -> int:
        """Memory that this run could have at most: HBM that was free when it began, as much of each GPU as of the one
        that had least; or this host's."""
        return memory_limit_bytes() if self.gpus is None else self.gpus.limit_bytes

    @property
    def free_bytes(self) -> int:
        """HBM that was free when the run began, of the GPU that had least; 0 on host memory."""
        return 0 if self.gpus is None else self.gpus.free_bytes

    def prepare_device(self) -> None:
        """Before the first process: settle how they share the GPUs. From here on this process sees those GPUs alone
        too, for the segments that it makes there; the driver reads the environment when it is opened, so that comes
        after. On host memory nothing happens.

        Raises:
            SegmentError: the memory of a GPU cannot be reached.
        """
        gpus = self.gpus
        if gpus is None:
            return
        start_s = time.monotonic()
        gpus.start(os.environ, external_workers=self._options.external_workers)
        os.environ.update(gpus.sight)  # not a client of a daemon: it computes nothing
        for device, one in gpus.devices.items():
            self.holder.gpu(device, backend("cuda", uuid=one.gpu.info.uuid))
        self.supervisor.gpus = gpus.access
        for device, one in gpus.devices.items():
            self._device_ready(device, one)
        self.record.stage("device", start_s)

    def _device_ready(self, device: Device, one: GpuDevice) -> None:
        info, sharing, mps = one.gpu.info, one.sharing, one.mps
        if mps is not None and self.gpus is not None:
            self.supervisor.free_gpu = self.gpus.free
            self._watch_daemon(device, mps)
        log.info("%s: %.1f GiB free, workers share it by %s", info, one.free_bytes / 2**30, sharing.used)
        self.record.append(
            DeviceReady(
                device=device,
                gpu=info.index,
                uuid=info.uuid,
                name=info.name,
                driver=info.driver,
                total_bytes=info.total_bytes,
                free_bytes=one.free_bytes,
                sharing_asked=sharing.asked,
                sharing_used=sharing.used,
                why=sharing.why[:4_000],
            )
        )

    def _watch_daemon(self, device: Device, mps: Mps) -> None:
        self.link.watch(mps.pidfd, self._daemon(device), partial(_raise, mps.died()))

    def _daemon(self, device: Device) -> str:
        return "death of the MPS daemon" + ("" if self.fleet.single else f" of device {device}")

    def observe(self, memory: Memory, budget_bytes: int) -> None:
        """Watch the memory of each GPU from now on, against the books. On host memory nothing happens.

        Args:
            budget_bytes: what the run may use in all, overhead included: of each GPU an equal share.
        """
        if self.gpus is None:
            return
        share = budget_bytes // len(self.gpus.devices)
        self.observers = memory.observers = Observers(
            {
                device: Observer(
                    one.gpu,
                    device,
                    baseline_bytes=one.baseline_bytes,
                    budget_bytes=share,
                    leased=partial(memory.leased, device),
                    name_of=self.supervisor.name_of,
                    tell=self.record.append,
                    label="" if self.fleet.single else f"device {device}: ",
                )
                for device, one in self.gpus.devices.items()
            }
        )
        self.observers.start()

    def start(self, role: Role) -> None:
        """Start the children of a role, one on each device that has one, and expect them; or, for external workers,
        only expect them."""
        for device in self.fleet.devices_of(role):
            self._start(role, device)

    def _start(self, role: Role, device: Device) -> None:
        name = self.fleet.name(role, device)
        if self.record.phase is Phase.LOAD:
            self._starting[name] = time.monotonic()
            self._first_start_s = min(self._starting.values())
        if self._options.external_workers and role in WORKERS:
            self.link.hub.expect(role, device, 1, exact=False)
            return
        child = self.supervisor.start(role, device)
        self.link.hub.expect(role, device, child.incarnation, exact=True)
        self.link.watch(child.pidfd, f"death of {name}", lambda: self.link.died(role, device))
        self.record.append(
            ServiceStarted(
                service=f"{role}[{device}]",
                role=role,
                device=device,
                incarnation=child.incarnation,
                pid=child.pid,
                log_path=str(child.log_path),
            )
        )

    @property
    def external_workers(self) -> bool:
        """Somebody else starts the workers."""
        return self._options.external_workers

    def dismiss(self, role: Role, reason: str) -> None:
        """End the one process of a role, for another program to take its place.

        Raises:
            NotEndedError: it was killed, and is still there.
        """
        child = self.supervisor.child(role)
        if child is not None:
            self.link.unwatch(child.pidfd, f"death of {self.fleet.name(role, child.device)}")
        self.link.dismiss(role, DEVICE, reason, self.config.deadlines.leave_s)
        if staying := self.supervisor.kill(role):
            raise NotEndedError.of(staying)

    def end_workers(self) -> None:
        """All workers end, whatever they are doing, and nothing of them is heard any more; what they used the GPUs
        through is new.

        Raises:
            NotEndedError: some were killed, and are still there.
            MpsError: a daemon cannot be started again.
        """
        for child in self.supervisor.children:
            if child.role in WORKERS:
                self.link.unwatch(child.pidfd, f"death of {self.fleet.name(child.role, child.device)}")
        self.link.forget_workers()
        staying = self.supervisor.end(WORKERS)
        self._remove_meets()
        if staying:
            raise NotEndedError.of(staying)
        if self.gpus is not None:
            self._start_daemons_again(self.gpus)

    def _start_daemons_again(self, gpus: Gpus) -> None:
        for device in gpus.devices:
            if (old := gpus.daemon(device)) is not None:
                self.link.unwatch(old.pidfd, self._daemon(device))
        gpus.start_again(os.environ)
        self.supervisor.gpus = gpus.access
        for device in gpus.devices:
            if (mps := gpus.daemon(device)) is not None:
                self._watch_daemon(device, mps)

    def end(self, reason: str) -> None:
        """Everybody leaves; who does not within the grace time is killed, if it is ours. Then everything is closed. A
        step that raises keeps none of the others from happening: a daemon or segment that stayed would keep the GPU."""
        with ExitStack() as closing:  # the last one first
            closing.callback(self.record.close)
            if self.gpus is not None:
                closing.callback(self.gpus.close)
            if self.observers is not None:
                closing.callback(self.observers.close)
            closing.callback(self.holder.close_all)
            closing.callback(self.link.hub.close)
            closing.callback(self._remove_meets)
            closing.callback(self.supervisor.stop)
            self._let_go(reason)

    def _remove_meets(self) -> None:
        for file in self.run_dir.glob(f"{MEET}.*"):
            file.unlink(missing_ok=True)

    def _let_go(self, reason: str) -> None:
        """The processes end."""
        for child in self.supervisor.children:
            self.link.unwatch(child.pidfd, f"death of {self.fleet.name(child.role, child.device)}")
            if self.link.peer(child.role, child.device) is None:
                self.supervisor.kill(child.role, child.device)  # still starting: it could not be told to leave
        self.link.leave_all(reason)
        staying = self.link.await_ends(self.config.deadlines.leave_s, lambda: self.supervisor.running)
        killed = self.supervisor.stop()
        for late in {self.fleet.name(peer.role, peer.device) for peer in staying} | set(killed):
            log.warning("%s did not leave in time%s", late, " and was killed" if late in killed else "")

    def _parent_ended(self) -> None:
        self.link.stop(StopRun(source="the end of the process that started it", exit_code=1))

    def _joined(self, peer: Peer) -> None:
        name = self.fleet.name(peer.role, peer.device)
        self.joined_wall_s[name] = time.time()
        if name in self._starting:
            self.record.stage(f"{name} process", self._starting.pop(name))
            if not self._starting:
                self.record.stage("processes", self._first_start_s)
        if self.supervisor.child(peer.role, peer.device) is None:
            self.record.append(
                ServiceStarted(
                    service=str(peer), role=peer.role, device=peer.device, incarnation=peer.incarnation, pid=peer.pid
                )
            )

    def _gone(self, peer: Peer, how: str) -> None:
        child = self.supervisor.child(peer.role, peer.device)
        self.record.append(
            ServiceDied(
                service=str(peer),
                role=peer.role,
                incarnation=peer.incarnation,
                pid=peer.pid or (child.pid if child else 0),
                how=how,
                phase=self.record.phase.name,
                step=self.record.step,
                log_path=self.supervisor.log_text(peer.role, peer.device),
            )
        )


def _raise(error: RollplexError) -> NoReturn:
    raise error


def commands(config: Config) -> Mapping[Role, Sequence[str]]:
    """The programs that the configuration names instead of ours."""
    services = config.services
    named = {Role.ROLLOUT: services.rollout, Role.PREFIX: services.prefix, Role.TRAINER: services.trainer}
    return {role: command for role, command in named.items() if command is not None}
