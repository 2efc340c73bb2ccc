"""The MPS daemon of one GPU: started before the workers, watched while they run, stopped after them.

    start ─► `nvidia-cuda-mps-control -d` ─► pid file and answers ─► (clients come; it forks its server) ─► quit ─► gone

Owns the daemon and its two folders. Its sockets are in a private folder with a short path, since a run directory's may
be too long for a socket; RUN/mps is a link to it, by which a later coordinator of the same run directory finds and
stops what a crashed one left. Its logs are in RUN/logs/mps. Of a run with several GPUs each has a daemon, the second
with RUN/mps-1 and RUN/logs/mps-1, and so on. Does not know who its clients are.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rollplex.errors import RollplexError

PROGRAM = "nvidia-cuda-mps-control"
PIPE_DIRECTORY, LOG_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
LINK = "mps"
CONTROL = "control"
"""The pipe by which a daemon is spoken to, in the folder of its pipes."""
START_S, ANSWER_S, STOP_S, KILL_S = 15.0, 5.0, 10.0, 5.0
_PID_FILE = f"{PROGRAM}.pid"
_NAME = b"nvidia-cuda-mps-"
"""Of the control daemon and of its server."""
_PAUSE_S = 0.02

log = logging.getLogger("rollplex.coordinator")


class MpsError(RollplexError):
    """The MPS daemon is not there, does not start, does not answer, or has ended."""


class Mps:
    """A daemon that runs.

    Args:
        run_dir: of the run; gets the link and the logs.
        gpu_uuid: the only GPU that it serves.
        variables: the environment to start from.
        number: of the GPU among the run's, from 0 on.

    Raises:
        MpsError: it could not be started; nothing of it is left.
    """

    def __init__(self, run_dir: Path, gpu_uuid: str, variables: Mapping[str, str], number: int = 0) -> None:
        program = shutil.which(PROGRAM, path=variables.get("PATH"))
        if program is None:
            raise MpsError(
                "the MPS daemon is not installed",
                got=f"no {PROGRAM} on PATH",
                do="It comes with the NVIDIA driver (nvidia-compute-utils).",
            )
        self._program = program
        name = f"{LINK}-{number}" if number else LINK
        self._link = run_dir / name
        self.log_dir = run_dir / "logs" / name
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="rollplex-mps-"))  # mkdtemp makes it 0700
        self._environment = {
            **variables,
            "CUDA_VISIBLE_DEVICES": gpu_uuid,
            PIPE_DIRECTORY: str(self.folder),
            LOG_DIRECTORY: str(self.log_dir),
        }
        self.pidfd = -1
        try:
            self._link.unlink(missing_ok=True)
            self._link.symlink_to(self.folder)
            self.pid = self._start()
            self.pidfd = os.pidfd_open(self.pid)
        except (RollplexError, OSError) as error:
            self._sweep()
            if isinstance(error, RollplexError):
                raise
            raise MpsError("the MPS daemon could not be started", got=str(error), where=str(self.folder)) from error

    @property
    def variables(self) -> dict[str, str]:
        """What a client's environment needs."""
        return {PIPE_DIRECTORY: str(self.folder), LOG_DIRECTORY: str(self.log_dir)}

    @property
    def alive(self) -> bool:
        """Whether the control process still runs."""
        return self.pidfd >= 0 and not select.select([self.pidfd], [], [], 0)[0]

    def died(self) -> MpsError:
        """What its death is told as."""
        return MpsError(
            "the MPS daemon ended while the workers used the GPU through it",
            got=f"pid {self.pid} is gone",
            needed="a daemon for as long as the run lasts",
            do=f"Its logs are in {self.log_dir}. device.sharing: turns does without it.",
        )

    def terminate(self, client: int) -> None:
        """Free the GPU of one client that cannot end by itself: the way that leaves the other clients whole. To kill a
        client in the middle of a kernel is undefined under MPS.

        Raises:
            MpsError: the daemon does not answer.
        """
        for server in self._ask("get_server_list").split():
            if server.isdigit():
                self._ask(f"terminate_client {server} {client}")

    def stop(self, deadline_s: float = STOP_S) -> None:
        """Ask it to quit; if it stays, kill it and its server. Again: nothing happens."""
        if self.pidfd < 0:
            return
        end = time.monotonic() + deadline_s
        if self.alive:
            try:
                self._ask("quit -t 1", deadline_s)  # plain quit waits for clients, of which this process is one
            except MpsError as error:
                log.warning("%s", error)
            if not select.select([self.pidfd], [], [], max(0.0, end - time.monotonic()))[0]:
                log.warning("the MPS daemon did not quit within %g s and was killed", deadline_s)
        os.close(self.pidfd)
        self.pidfd = -1
        self._sweep()

    def _start(self) -> int:
        """Its output goes to a file: a pipe would be held open by the daemon."""
        output = self.log_dir / "start.log"
        end = time.monotonic() + START_S
        try:
            with output.open("ab") as file:
                done = subprocess.run(
                    [self._program, "-d"],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                    check=False,
                    timeout=START_S,
                )
        except subprocess.TimeoutExpired as error:
            raise MpsError(
                "the MPS daemon did not start in time", got=f"more than {START_S:g} s", where=str(output)
            ) from error
        if done.returncode != 0:
            said = output.read_text(encoding="utf-8", errors="replace").strip()[-500:]
            raise MpsError(
                "the MPS daemon could not be started",
                got=f"exit code {done.returncode}" + (f": {said}" if said else ""),
                where=str(self.log_dir),
            )
        while (pid := _pid_in(self.folder)) is None:
            if time.monotonic() > end:
                raise MpsError("the MPS daemon says no pid", needed=_PID_FILE, where=str(self.folder))
            time.sleep(_PAUSE_S)
        self._ask("get_server_list", max(_PAUSE_S, end - time.monotonic()))
        return pid

    def _ask(self, command: str, deadline_s: float = ANSWER_S) -> str:
        try:
            done = subprocess.run(
                [self._program],
                input=f"{command}\n",
                env=self._environment,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=deadline_s,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MpsError(f"the MPS daemon did not answer {command!r}", got=str(error)) from error
        if done.returncode != 0:
            raise MpsError(
                f"the MPS daemon refused {command!r}",
                got=f"exit code {done.returncode}: {(done.stdout + done.stderr).strip()[-500:]}",
            )
        return done.stdout

    def _sweep(self) -> None:
        """Nothing of it may run on, and nothing stay in /tmp."""
        _kill_all(self.folder)
        self._link.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def stop_leftovers(run_dir: Path) -> bool:
    """Stop the daemons that a crashed coordinator of this run directory left, if there are any; True: there were.

    Only the holder of the run directory's lock may do this.
    """
    links = [link for link in (run_dir / LINK, *sorted(run_dir.glob(f"{LINK}-*"))) if link.is_symlink()]
    found = [_stop_leftover(link) for link in links]
    return any(found)


def _stop_leftover(link: Path) -> bool:
    folder = link.readlink()
    found = _kill_all(folder)
    link.unlink()
    if folder.name.startswith("rollplex-mps-"):
        shutil.rmtree(folder, ignore_errors=True)
    if found:
        log.warning("an MPS daemon that an earlier run left was stopped (pid %s)", ", ".join(map(str, found)))
    return bool(found)


def _pid_in(folder: Path) -> int | None:
    """What the daemon's pid file says, if that process is one of MPS."""
    try:
        pid = int((folder / _PID_FILE).read_text().strip())
    except (OSError, ValueError):
        return None
    return pid if _is_mps(pid) else None


def _is_mps(pid: int) -> bool:
    """Pids are given out again: the name must fit too."""
    try:
        return _NAME in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _members(folder: Path) -> list[int]:
    """The daemon of a folder, and servers that it started: children by parent, and whoever has its environment."""
    mark, control = f"{PIPE_DIRECTORY}={folder}\0".encode(), _pid_in(folder)
    found = [] if control is None else [control]
    for place in Path("/proc").iterdir():
        if not place.name.isdigit() or (pid := int(place.name)) in found or not _is_mps(pid):
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            parent = int((place / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            if parent == control or mark in (place / "environ").read_bytes():
                found.append(pid)
    return found


def _kill_all(folder: Path) -> list[int]:
    """Kill what belongs to a folder and wait until it is gone; returns the pids that there were."""
    end, all_found = time.monotonic() + KILL_S, []
    while (found := _members(folder)) and time.monotonic() < end:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        all_found += [pid for pid in found if pid not in all_found]
        time.sleep(_PAUSE_S)
    if found:
        log.error("processes of an MPS daemon cannot be ended: %s", ", ".join(map(str, found)))
    return all_found
