"""The program under test as a process, and what it leaves.

Owns its start, its end, and the processes of its session. Knows no messages.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from rollplex.errors import ConfigError
from rollplex.session import kill, kill_session, session_of

AS_A_NODE: Final = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
"""The environment that a node's supervisor gives to a worker with one thread."""
TAIL_BYTES = 2_000
GONE_S = 3.0
_PAUSE_S = 0.01


class Program:
    """One process of `command`, in a session of its own, with what the supervisor of a node would add to it."""

    def __init__(self, command: Sequence[str], run_dir: Path, log_path: Path) -> None:
        """Raises ConfigError if it cannot be started."""
        self._log_path = log_path
        self._run_dir = run_dir
        self._before = _files(run_dir)
        self._shared: set[str] = set()
        arguments = ["--run-dir", str(run_dir), "--device", "0:0", "--incarnation", "1"]
        try:
            with log_path.open("wb") as output:
                self._process = subprocess.Popen(
                    [*command, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **AS_A_NODE},
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError("The program cannot be started", got=str(error), where=command[0]) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    @property
    def how(self) -> str:
        """How it ended, or that it runs."""
        code = self.exit_code
        if code is None:
            return "it still runs"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    @property
    def log(self) -> str:
        """The end of what it wrote."""
        content = self._log_path.read_bytes() if self._log_path.exists() else b""
        return content[-TAIL_BYTES:].decode("utf-8", "replace").strip()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing if it has ended."""
        self._process.send_signal(number)

    def look(self) -> None:
        """Note which named shared memory it has mapped, while it lives."""
        for pid in (self.pid, *session_of(self.pid)):
            with suppress(OSError):
                for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                    if "/dev/shm/" in line and "(deleted)" not in line:  # noqa: S108 - where the kernel has it
                        self._shared.add(line[line.index("/dev/shm/") :].strip())  # noqa: S108

    def leftovers(self) -> list[str]:
        """What is left some time after its end: processes, files, named shared memory."""
        end = time.monotonic() + GONE_S
        while (members := session_of(self.pid)) and time.monotonic() < end:
            time.sleep(_PAUSE_S)
        left = [f"process {pid}" for pid in members]
        left += [f"file {name}" for name in sorted(_files(self._run_dir) - self._before)]
        return left + [f"shared memory {name}" for name in sorted(self._shared) if Path(name).exists()]

    def end(self) -> None:
        """End it and everything in its session, if anything is left of it."""
        if self._process.poll() is None:
            kill(self.pid)
        kill_session(self.pid)
        self._process.wait(timeout=GONE_S)


def _files(run_dir: Path) -> set[str]:
    """Files below a run directory, but the one in which a worker counts its incarnations."""
    names = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if not path.is_dir()}
    return {name for name in names if not name.startswith("incarnations/")}
