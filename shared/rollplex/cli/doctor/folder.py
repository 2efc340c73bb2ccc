"""The folder in which runs go: can it be written, does it hold locks and sockets, is there room."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rollplex.cli.doctor.finding import Finding, note, ok, problem
from rollplex.cli.target import all_runs
from rollplex.protocol.rundir import MAX_SOCKET_PATH_BYTES, NETWORK_FILE_SYSTEMS, RunDir, file_system_of
from rollplex.terminal.words import size

TOPIC = "runs folder"
LITTLE_BYTES = 2**30
NAME_BYTES = 40
"""A name that is made from run.name, date and time, with some room."""
_ELSEWHERE = "Name another folder: ROLLPLEX_RUNS_DIR, or --run-dir for one run."


def check(runs_dir: Path) -> Iterator[Finding]:
    """Everything about the runs folder; it need not exist, and is not made."""
    runs_dir = runs_dir.absolute()
    there = runs_dir.is_dir()
    yield ok(TOPIC, f"{runs_dir}, {len(all_runs(runs_dir))} runs" if there else f"{runs_dir}, not made yet")
    place = _nearest(runs_dir)
    yield _file_system(place)
    yield _names(runs_dir)
    yield _usable(place)
    yield _space(place)


def _nearest(path: Path) -> Path:
    """The folder itself, or that in which it would be made."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _file_system(place: Path) -> Finding:
    kind = file_system_of(place)
    if kind in NETWORK_FILE_SYSTEMS:
        return problem("file system", f"{kind}, over the network: a run needs a local one", _ELSEWHERE)
    return ok("file system", kind or "unknown")


def _names(runs_dir: Path) -> Finding:
    longest = RunDir(runs_dir / "n").segments_socket
    room = MAX_SOCKET_PATH_BYTES - len(os.fsencode(longest)) + 1
    text = f"a run's name may have {max(0, room)} bytes, so that the paths of its sockets are not too long"
    return ok("path", text) if room >= NAME_BYTES else problem("path", text, f"{_ELSEWHERE} A shorter path.")


def _usable(place: Path) -> Finding:
    """Whether files, locks and sockets can be made there; they are removed again."""
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".rollplex-doctor-") as name:
            folder = Path(name)
            if len(os.fsencode(folder / "s")) <= MAX_SOCKET_PATH_BYTES:
                with socket.socket(socket.AF_UNIX) as listener:
                    listener.bind(str(folder / "s"))
            with (folder / "lock").open("wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.write(b"doctor")
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        return problem("files", f"files, locks and sockets cannot be made in {place}: {error}", _ELSEWHERE)
    return ok("files", "can be written and locked, and sockets be made, in " + str(place))


def _space(place: Path) -> Finding:
    free = shutil.disk_usage(place).free
    if free < LITTLE_BYTES:
        return note("disk", f"{size(free)} free", "A checkpoint has about 16 bytes for each parameter: free some.")
    return ok("disk", f"{size(free)} free")
