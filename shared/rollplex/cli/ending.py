"""Ends a run from outside: by its control API, and where that does not answer, by signals to its coordinator.

    stop   POST /stop ──► the process is gone
    down   POST /stop now ──► gone within the grace time? ──no──► SIGTERM ──► gone? ──no──► SIGKILL

A signal goes only to a process that is seen to be the coordinator of that run: by its command line, and by the lock
file that it has open. Knows nothing of what a coordinator does to end.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rollplex.cli.api import connect
from rollplex.errors import RollplexError, WaitError
from rollplex.protocol.claim import Holder, holder_of
from rollplex.protocol.rundir import RunDir

PROGRAM = "rollplex_coordinator"
KILLED_S = 10.0
"""How long the kernel may take to end a process that was killed."""
_POLL_S = 0.1


def stop(run_dir: Path, *, now: bool, wait_s: float, say: Callable[[str], None]) -> None:
    """Ask the run to end, after its iteration or now, and wait until its coordinator is gone.

    Args:
        wait_s: how long; 0: do not wait.

    Raises:
        StateError: it is not going on.
        WaitError: it does not answer, or is still there.
    """
    holder = holder_of(run_dir)
    with connect(run_dir) as api:
        status = api.stop(now=now, leave=True)
    say(f"{status.run} stops {'now' if now else 'after this iteration'}")
    if not wait_s or gone(run_dir, holder, wait_s):
        return
    raise WaitError(
        "The run has not ended yet",
        got=f"it still goes on after {wait_s:g} s",
        needed="the end of its iteration and, unless it was to stop now, of its last evaluations and checkpoint",
        do="It will end by itself. `rollplex status` says what it waits for; `rollplex down` ends it without waiting.",
        where=str(run_dir),
    )


def stay(run_dir: Path, *, wait_s: float, say: Callable[[str], None]) -> None:
    """Ask the run to stop after its iteration and to wait for the next start.

    Raises:
        StateError: it is not going on.
        WaitError: it does not answer, or still iterates after `wait_s` (0: do not wait).
    """
    with connect(run_dir) as api:
        status = api.stop(now=False, leave=False)
        say(f"{status.run} stops after this iteration and stays")
        end_s = time.monotonic() + wait_s
        while wait_s and (status.phase != "IDLE" or status.iterations_done < status.iterations_wanted):
            if time.monotonic() > end_s:
                raise WaitError(
                    "The run still iterates",
                    got=f"phase {status.phase} after {wait_s:g} s",
                    needed="the end of its iteration",
                    do="It will stop by itself; `rollplex status` says what it waits for.",
                    where=str(run_dir),
                )
            time.sleep(_POLL_S)
            status = api.status()
    if wait_s:
        say(f"it waits after {status.iterations_done} iterations; `rollplex start N` goes on, `rollplex stop` ends it")


def down(run_dir: Path, *, grace_s: float, say: Callable[[str], None]) -> None:
    """End a run for certain, and say how. Nothing is saved that is not saved yet.

    Args:
        grace_s: for an orderly end, after the stop and again after SIGTERM.

    Raises:
        RollplexError: it runs on another host, or what holds it is not a coordinator that we can see.
    """
    holder = holder_of(run_dir)
    if holder is None:
        say(f"{run_dir}: nothing is running")
        return
    try:
        with connect(run_dir) as api:
            api.stop(now=True, leave=True)
    except RollplexError as error:
        say(f"{run_dir}: the control API cannot be used: {error.what}; got {error.got}")
    else:
        if gone(run_dir, holder, grace_s):
            say(f"{run_dir}: stopped")
            return
        say(f"{run_dir}: it was told to stop and is still there after {grace_s:g} s")
    _end_by_signals(run_dir, holder, grace_s, say)


def gone(run_dir: Path, holder: Holder | None, wait_s: float) -> bool:
    """Whether that coordinator no longer holds the run, within so many seconds."""
    end_s = time.monotonic() + wait_s
    while holder is not None and holder_of(run_dir) == holder:
        if time.monotonic() > end_s:
            return False
        time.sleep(_POLL_S)
    return True


def _end_by_signals(run_dir: Path, holder: Holder, grace_s: float, say: Callable[[str], None]) -> None:
    try:
        pidfd = _open_coordinator(run_dir, holder)
    except ProcessLookupError:
        pidfd = None  # it ended by itself meanwhile
    if pidfd is None:
        if gone(run_dir, holder, KILLED_S):
            say(f"{run_dir}: it has ended meanwhile")
            return
        raise _not_ours(run_dir, f"no process {holder.pid} on this host")
    try:
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILLED_S)):
            with suppress(ProcessLookupError):  # it is gone already
                signal.pidfd_send_signal(pidfd, number)
            if gone(run_dir, holder, wait_s):
                say(f"{run_dir}: ended by {number.name} to pid {holder.pid}{_after(number)}")
                return
            say(f"{run_dir}: {number.name} to pid {holder.pid} had no effect for {wait_s:g} s")
    finally:
        os.close(pidfd)
    raise RollplexError(
        "The coordinator cannot be ended",
        got=f"pid {holder.pid} still holds the run after SIGKILL",
        do="It hangs in the kernel (state D in `ps`): look at the file system of the run.",
        where=str(run_dir),
    )


def _after(number: signal.Signals) -> str:
    return "; its workers leave by themselves within seconds" if number is signal.SIGKILL else ""


def _open_coordinator(run_dir: Path, holder: Holder) -> int:
    """A pidfd of the run's coordinator: pid and process cannot come apart after it was looked at.

    Raises:
        ProcessLookupError: there is no such process.
        RollplexError: it is on another host, somebody else's, or another program.
    """
    if holder.host != socket.gethostname():
        raise RollplexError(
            "The run is held on another host, or in a container",
            got=f"pid {holder.pid} on {holder.host}",
            needed=f"a process on this host, {socket.gethostname()}",
            do="Run `rollplex down` there; for containers, `docker compose down`.",
            where=str(run_dir),
        )
    pidfd = os.pidfd_open(holder.pid)
    try:
        process = Path(f"/proc/{holder.pid}")
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        if PROGRAM not in words:
            raise _not_ours(run_dir, f"pid {holder.pid}: {' '.join(words).strip()[:200]}")
        lock_file = str(RunDir(run_dir).lock_file.resolve())
        if lock_file not in _open_files(process):
            raise _not_ours(run_dir, f"pid {holder.pid}, a coordinator that does not have {lock_file} open")
    except FileNotFoundError as error:
        os.close(pidfd)
        raise ProcessLookupError(f"process {holder.pid} ended") from error
    except BaseException:
        os.close(pidfd)
        raise
    return pidfd


def _open_files(process: Path) -> set[str]:
    found = set()
    for link in (process / "fd").iterdir():
        try:
            found.add(str(link.readlink()))
        except FileNotFoundError:
            continue  # closed meanwhile
    return found


def _not_ours(run_dir: Path, got: str) -> RollplexError:
    return RollplexError(
        "What holds the run is not its coordinator as far as can be seen, so nothing was ended",
        got=got,
        needed=f"the process that runs {PROGRAM} and holds the lock",
        do=f"Find it with `fuser {RunDir(run_dir).lock_file}`, and end it.",
        where=str(run_dir),
    )
