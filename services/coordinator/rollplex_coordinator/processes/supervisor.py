"""Starts the node's processes, notices their death, stops them in order.

Owns child processes and their log files. A child's death is seen through its pidfd, at once. Knows nothing of
messages. Children are started from the main thread, each in a session of its own, so that a Ctrl-C at the terminal
reaches the coordinator alone.

How a child that stays is ended. On host memory: SIGKILL. Where it shares a GPU, in this order, as long as it runs:

    SIGTERM ─(TERM_S)─► `free_gpu` (MPS: terminate_client) ─(TERM_S)─► SIGKILL

since to kill a client in the middle of a kernel is undefined under MPS: the others could be lost with it. A worker may
have processes of its own (SGLang's scheduler is the one that uses the GPU): they are in its session, and end with it.
Who has not ended KILLED_S after SIGKILL is held by the kernel, as a GPU's driver can do: that is told to the caller,
who may not take what it held for free.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from rollplex.errors import ConfigError, RollplexError
from rollplex.programs import own
from rollplex.protocol.common import Device, Role
from rollplex.session import await_session, kill_session, session_of
from rollplex.worker.starter import VARIABLE as STARTED_BY
from rollplex_coordinator.decisions.fleet import DEVICE, SINGLE, Fleet
from rollplex_coordinator.limits import WANTED_FILES
from rollplex_coordinator.processes.environment import WORKERS, GpuAccess, environment_of

TERM_S = 2.0
KILLED_S = 30.0
"""For all that are killed together: a driver takes the memory of those on its GPUs back one after the other."""
_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
"""No program is at fault."""
ABORTED = signal.SIGABRT.name
KILLED = "killed by"
"""How the words for an end by a signal begin."""

log = logging.getLogger("rollplex.coordinator")

MODULES: Mapping[Role, str] = {
    Role.ROLLOUT: "rollplex_rollout",
    Role.PREFIX: "rollplex_prefix",
    Role.TRAINER: "rollplex_trainer",
    Role.INPUT: "rollplex.data",
    Role.REWARD: "rollplex.rewards",
}


class NotEndedError(RollplexError):
    """Workers that were killed are still there."""

    @classmethod
    def of(cls, staying: Sequence[str]) -> NotEndedError:
        """Of those that `Supervisor.end` returns."""
        return cls(
            "Workers were killed and have not ended: the kernel holds them",
            got=", ".join(staying),
            needed="an end of all of them: what they hold is not free, and nobody may take their places",
            do="Look at the kernel's log for what the GPU's driver says; when they are gone, `rollplex up --resume`.",
        )


class Child(Struct, kw_only=True):
    """One process that this coordinator started."""

    role: Role
    device: Device
    incarnation: int
    process: subprocess.Popen[bytes]
    pidfd: int
    log_path: Path

    @property
    def pid(self) -> int:
        return self.process.pid


class Supervisor:
    """The children of one coordinator.

    Args:
        run_dir: passed to each child; logs go to `run_dir/logs/<role>.log`, of a role with several processes to
            `<role>-<index of the device>.log`.
        threads: torch and OpenMP threads per process.
        commands: another program for a role, instead of `python -m <module>`.
        fleet: which processes there are. Where there is one of a role, its device need not be named.
    """

    def __init__(
        self, run_dir: Path, threads: int, commands: Mapping[Role, Sequence[str]], fleet: Fleet = SINGLE
    ) -> None:
        self._run_dir = run_dir
        self._threads = threads
        self._commands = commands
        self._fleet = fleet
        self._children: dict[str, Child] = {}
        self._incarnations: dict[str, int] = {}
        self.gpus: Mapping[Device, GpuAccess] = {}
        """What the workers of each device get to see from now on; empty: no GPU."""
        self.free_gpu: Callable[[Device, int], None] | None = None
        """Called with device and pid of a worker that did not end by SIGTERM; None: there is no such way."""

    def command(self, role: Role) -> tuple[str, ...]:
        """The program of a role."""
        return tuple(self._commands.get(role) or own(MODULES[role]))

    def use(self, role: Role, command: Sequence[str]) -> None:
        """Start this program for a role from now on."""
        self._commands = {**self._commands, role: tuple(command)}

    def start(self, role: Role, device: Device) -> Child:
        """Start one child.

        Raises:
            ConfigError: its program cannot be started.
        """
        name = self._fleet.name(role, device)
        incarnation = self._incarnations[name] = self._incarnations.get(name, 0) + 1
        command = [*self.command(role), "--run-dir", str(self._run_dir), "--device", str(device)]
        command += ["--incarnation", str(incarnation)]
        log_path = self.log_path(role, device)
        log_path.parent.mkdir(exist_ok=True)
        with log_path.open("ab") as output:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=environment_of(role, os.environ, self._threads, self.gpus.get(device))
                    | {STARTED_BY: str(os.getpid())},
                )
            except OSError as error:
                if error.errno in _LIMITS:
                    raise RollplexError(
                        f"the process of {name} cannot be started",
                        got=str(error),
                        do=f"Raise the limits of this shell: ulimit -n {WANTED_FILES}, ulimit -u unlimited.",
                    ) from error
                raise ConfigError(
                    f"the program of {name} cannot be started",
                    got=str(error),
                    needed="a program that is there and can be run",
                    do=f"Name another one: services.{role} of the configuration.",
                    where=command[0],
                ) from error
        child = Child(
            role=role,
            device=device,
            incarnation=incarnation,
            process=process,
            pidfd=os.pidfd_open(process.pid),
            log_path=log_path,
        )
        self._children[name] = child
        return child

    def log_path(self, role: Role, device: Device = DEVICE) -> Path:
        """Where a process's output goes, if this supervisor starts it."""
        name = f"{role}-{device.index}" if self._fleet.several(role) else str(role)
        return self._run_dir / "logs" / f"{name}.log"

    def log_text(self, role: Role, device: Device = DEVICE) -> str:
        """`log_path` of a process that was started here; empty for one that somebody else started and logs."""
        started = self._fleet.name(role, device) in self._incarnations
        return str(self.log_path(role, device)) if started else ""

    def child(self, role: Role, device: Device = DEVICE) -> Child | None:
        """The running or dead child of a role on a device."""
        return self._children.get(self._fleet.name(role, device))

    @property
    def children(self) -> tuple[Child, ...]:
        """All that run, or are dead and not collected yet."""
        return tuple(self._children.values())

    def name_of(self, pid: int) -> str:
        """Which child a process is, or belongs to (each has a session of its own); empty for others."""
        try:
            session = os.getsid(pid)
        except OSError:
            session = 0
        return next((name for name, child in self._children.items() if child.pid in {pid, session}), "")

    def exit_text(self, role: Role, device: Device = DEVICE) -> str:
        """How a dead child ended, in words; empty if it still runs or is not ours."""
        child = self.child(role, device)
        code = child.process.poll() if child else None
        if code is None:
            return ""
        if code < 0:
            return f"{KILLED} {signal.Signals(-code).name}"
        return f"exit code {code}"

    def kill(self, role: Role, device: Device = DEVICE) -> list[str]:
        """End one child now and collect it; returns who of it has not ended, as `end`."""
        child = self.child(role, device)
        return [] if child is None else self._kill_all([child])

    @property
    def running(self) -> bool:
        """Whether any child still runs."""
        return any(child.process.poll() is None for child in self._children.values())

    def stop(self) -> list[str]:
        """End the children that still run and collect all; returns the names of those that ran."""
        late = {name: child for name, child in self._children.items() if child.process.poll() is None}
        self._ask_to_end(child for child in late.values() if child.role in WORKERS)
        self._kill_all(self.children)
        return list(late)

    def end(self, roles: Collection[Role]) -> list[str]:
        """End all children of these roles, whether they run or are dead, and collect them.

        Returns:
            Who was killed and has not ended, a worker or what it started: named, with the pid.
        """
        ended = [child for child in self.children if child.role in roles]
        self._ask_to_end(child for child in ended if child.role in WORKERS and child.process.poll() is None)
        return self._kill_all(ended)

    def _kill_all(self, children: Sequence[Child]) -> list[str]:
        """SIGKILL, and collect. One that the kernel holds is named and left, since what else is to be ended must not
        stay because of it: all are killed before any is awaited, and one deadline is that of all."""
        for child in children:
            child.process.kill()
            if child.role in WORKERS:
                kill_session(child.pid)
        end_s = time.monotonic() + KILLED_S
        return [staying for child in children for staying in self._collect(child, end_s)]

    def _collect(self, child: Child, end_s: float) -> list[str]:
        name, staying = self._fleet.name(child.role, child.device), []
        del self._children[name]
        # Before the child itself: nobody else gets its pid, which is the session's, as long as it is not collected.
        members = await_session(child.pid, end_s) if child.role in WORKERS else []
        try:
            child.process.wait(timeout=max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            staying.append(f"{name} (pid {child.pid})")
        os.close(child.pidfd)
        staying += [f"a process of {name} (pid {pid})" for pid in members]
        for who in staying:
            log.error("%s was killed, but has not ended: the kernel holds it", who)
        return staying

    def _ask_to_end(self, workers: Iterable[Child]) -> None:
        """Before SIGKILL, where workers share a GPU."""
        running = list(workers) if self.free_gpu is not None else []
        for child in running:
            child.process.terminate()
        running = _still_running(running, TERM_S)
        for child in running:
            assert self.free_gpu is not None, "it was there a moment ago"
            for pid in (child.pid, *session_of(child.pid)):
                self.free_gpu(child.device, pid)
        _still_running(running, TERM_S)


def _still_running(children: Sequence[Child], deadline_s: float) -> list[Child]:
    """Those that have not ended when the deadline passes, which is not awaited if all have."""
    end = time.monotonic() + deadline_s
    for child in children:
        select.select([child.pidfd], [], [], max(0.0, end - time.monotonic()))
    return [child for child in children if child.process.poll() is None]
