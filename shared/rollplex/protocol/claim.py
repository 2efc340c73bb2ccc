"""That one coordinator owns a run directory, and what it leaves there for its workers.

Owns the lock, the clearing of what a dead coordinator left, and the making of the secret. The lock is flock's: the
kernel gives it back when the process dies or the machine loses power, so there are no stale locks, only stale notes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec import Struct

from rollplex.errors import ConfigError
from rollplex.protocol.handshake import SECRET_BYTES
from rollplex.protocol.rundir import RunDir, check_directory, check_path, unusable

_MAX_NOTE_BYTES = 4096
_LOOKS, _BETWEEN_LOOKS_S = 13, 0.02
"""How often, and after which pause, a lock is tried again that may only have been looked at (`holder_of`)."""


class Holder(Struct, frozen=True, kw_only=True):
    """The coordinator that holds a run directory, as its lock file tells."""

    pid: int
    host: str
    run_id: str


class Claim:
    """The right to be the coordinator of a run directory; lasts until `release` or the end of the process."""

    def __init__(self, run_dir: RunDir, lock_fd: int, secret: bytes) -> None:
        self.run_dir = run_dir
        self.secret = secret
        self._lock_fd: int | None = lock_fd

    def release(self) -> None:
        """Remove sockets and secret and give the lock back. A second call does nothing."""
        if self._lock_fd is None:
            return
        _clear(self.run_dir)
        os.ftruncate(self._lock_fd, 0)
        os.close(self._lock_fd)
        self._lock_fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def claim(path: Path, run_id: str) -> Claim:
    """Make or take over the run directory as its coordinator: lock it, clear what a dead one left, write a new secret.

    Raises:
        ConfigError: another coordinator holds it (named by pid, host and run); the path is too long, on a network file
            system, not a directory, not ours, open to others, or cannot be written.
    """
    run_dir = RunDir(path.absolute())
    check_path(run_dir)
    try:
        run_dir.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_directory(run_dir.path, adopt_empty=True)
        lock_fd = _lock(run_dir, run_id)
    except OSError as error:
        raise unusable(run_dir.path, error) from error
    try:
        for folder in (run_dir.sockets, run_dir.incarnations):
            folder.mkdir(mode=0o700, exist_ok=True)
            check_directory(folder, adopt_empty=True)
        _clear(run_dir)
        return Claim(run_dir, lock_fd, _write_secret(run_dir))
    except OSError as error:
        os.close(lock_fd)
        raise unusable(run_dir.path, error) from error
    except BaseException:
        os.close(lock_fd)
        raise


def holder_of(path: Path) -> Holder | None:
    """Which live process holds the run directory; None: nobody, or it is not there. Changes nothing.

    The kernel is asked, not the note alone: a note outlives a coordinator that was killed. It is asked by a shared
    lock, which never takes the lock away and which `claim` waits out.

    Raises:
        ConfigError: the lock file is there but cannot be read.
    """
    lock_file = RunDir(path.absolute()).lock_file
    try:
        fd = os.open(lock_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unusable(path, error) from error
    try:
        if not os.pread(fd, 1, 0):
            return None  # given back in order, or never held
        for _ in range(_LOOKS):
            if _try_lock(fd, fcntl.LOCK_SH):
                return None
            if holder := _parse_note(os.pread(fd, _MAX_NOTE_BYTES, 0)):
                return holder
            time.sleep(_BETWEEN_LOOKS_S)  # its holder is just writing the note
    finally:
        os.close(fd)
    raise ConfigError(
        "A live process holds the run directory and does not say who it is",
        needed="the pid, host and run of its coordinator",
        do="Wait a moment; if it stays so, `fuser` on that file names the process.",
        where=str(lock_file),
    )


def _try_lock(fd: int, kind: int) -> bool:
    """Whether the lock was got, without waiting.

    Raises:
        OSError: it cannot be locked at all.
    """
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
            raise
        return False
    return True


def _lock(run_dir: RunDir, run_id: str) -> int:
    fd = os.open(run_dir.lock_file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        for look in range(_LOOKS):
            if _try_lock(fd, fcntl.LOCK_EX):
                break
            if look + 1 == _LOOKS:
                raise _held(run_dir, os.pread(fd, _MAX_NOTE_BYTES, 0))
            time.sleep(_BETWEEN_LOOKS_S)
    except BaseException:
        os.close(fd)
        raise
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "run_id": run_id}
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(holder).encode(), 0)
    return fd


def _held(run_dir: RunDir, note: bytes) -> ConfigError:
    holder = _parse_note(note)
    who = f"pid {holder.pid} on {holder.host}, run {holder.run_id}" if holder else "a process that is just starting"
    return ConfigError(
        "Another coordinator holds this run directory",
        got=who,
        needed="one coordinator per run directory",
        do="Stop it, or choose another run directory",
        where=str(run_dir.path),
    )


def _parse_note(note: bytes) -> Holder | None:
    try:
        fields = json.loads(note)
        return Holder(pid=int(fields["pid"]), host=str(fields["host"]), run_id=str(fields["run_id"]))
    except (ValueError, KeyError, TypeError):
        return None


def _clear(run_dir: RunDir) -> None:
    """Remove what belongs to one run; only the holder of the lock may."""
    for path in (run_dir.control_socket, run_dir.segments_socket):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ConfigError(
                    "Something that is not a socket is in a socket's place",
                    needed="nothing",
                    do="Remove it",
                    where=str(path),
                )
            path.unlink()
    run_dir.secret_file.unlink(missing_ok=True)


def _write_secret(run_dir: RunDir) -> bytes:
    """Complete from the moment it has its name, so that no worker reads half of it."""
    secret = secrets.token_bytes(SECRET_BYTES)
    partial = run_dir.path / f"secret.{os.getpid()}.new"
    partial.unlink(missing_ok=True)
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(secret)
    partial.rename(run_dir.secret_file)
    return secret
