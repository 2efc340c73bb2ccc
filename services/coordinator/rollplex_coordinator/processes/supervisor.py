"""Starts the node's processes, notices their death, stops them in order.

Owns child processes and their log files. A child's death is seen through its pidfd, at once. Knows nothing of
messages. Children are started from the main thread, each in a session of its own, so that a Ctrl-C at the terminal
reaches the coordinator alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from rollplex.protocol.common import Device, Role

MODULES: Mapping[Role, str] = {
    Role.ROLLOUT: "rollplex_rollout",
    Role.PREFIX: "rollplex_prefix",
    Role.TRAINER: "rollplex_trainer",
    Role.INPUT: "rollplex.data",
    Role.REWARD: "rollplex.rewards",
}


class Child(Struct, kw_only=True):
    """One process that this coordinator started."""

    role: Role
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
        run_dir: passed to each child; logs go to `run_dir/logs/<role>.log`.
        threads: torch and OpenMP threads per process.
        commands: another program for a role, instead of `python -m <module>`.
    """

    def __init__(self, run_dir: Path, threads: int, commands: Mapping[Role, Sequence[str]]) -> None:
        self._run_dir = run_dir
        self._threads = threads
        self._commands = commands
        self._children: dict[Role, Child] = {}
        self._incarnations: dict[Role, int] = {}

    def start(self, role: Role, device: Device) -> Child:
        """Start one child."""
        incarnation = self._incarnations[role] = self._incarnations.get(role, 0) + 1
        program = list(self._commands.get(role) or [sys.executable, "-m", MODULES[role]])
        command = [*program, "--run-dir", str(self._run_dir), "--device", str(device)]
        command += ["--incarnation", str(incarnation)]
        log_path = self.log_path(role)
        log_path.parent.mkdir(exist_ok=True)
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._environment(),
            )
        child = Child(
            role=role, incarnation=incarnation, process=process, pidfd=os.pidfd_open(process.pid), log_path=log_path
        )
        self._children[role] = child
        return child

    def log_path(self, role: Role) -> Path:
        """Where a role's output goes, if this supervisor starts it."""
        return self._run_dir / "logs" / f"{role}.log"

    def log_text(self, role: Role) -> str:
        """`log_path` of a role that was started here; empty for one that somebody else started and logs."""
        return str(self.log_path(role)) if role in self._incarnations else ""

    def child(self, role: Role) -> Child | None:
        """The running or dead child of a role."""
        return self._children.get(role)

    def exit_text(self, role: Role) -> str:
        """How a dead child ended, in words; empty if it still runs or is not ours."""
        child = self._children.get(role)
        code = child.process.poll() if child else None
        if code is None:
            return ""
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def kill(self, role: Role) -> None:
        """End one child now and collect it."""
        child = self._children.pop(role, None)
        if child is not None:
            child.process.kill()
            child.process.wait(timeout=10)
            os.close(child.pidfd)

    @property
    def running(self) -> bool:
        """Whether any child still runs."""
        return any(child.process.poll() is None for child in self._children.values())

    def stop(self) -> list[Role]:
        """Kill the children that still run and collect all; returns the killed ones."""
        late = [role for role, child in self._children.items() if child.process.poll() is None]
        for role in list(self._children):
            self.kill(role)
        return late

    def _environment(self) -> dict[str, str]:
        """The children's environment: thread pools that do not fight for two cores, and no network."""
        threads = str(self._threads)
        return {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "passive",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
