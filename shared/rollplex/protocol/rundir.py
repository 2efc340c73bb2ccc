"""The run directory: who may open it, where its sockets and its secret are, and that one coordinator owns it.

    RUN/                 0700, the only protection of the sockets (libzmq makes them as the umask says)
    RUN/coordinator.lock held with flock for the coordinator's life; says pid, host and run id of the holder
    RUN/secret           32 random bytes, 0600, new in each run
    RUN/incarnations/    one counter per place, for workers that no supervisor numbers
    RUN/sockets/control.sock    ROUTER of the coordinator
    RUN/sockets/segments.sock   AF_UNIX stream that passes segments

Owns the rules and their errors; knows nothing of messages. Filesystem paths only: anybody could connect to an abstract
socket.
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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rollplex.errors import ConfigError
from rollplex.protocol.common import Device, Role
from rollplex.protocol.handshake import SECRET_BYTES

MAX_SOCKET_PATH_BYTES = 107
"""sun_path holds 108 bytes with the final NUL."""
_MAX_NOTE_BYTES = 4096
_NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs"})


@dataclass(frozen=True)
class RunDir:
    """Paths of one run directory."""

    path: Path

    @property
    def sockets(self) -> Path:
        return self.path / "sockets"

    @property
    def control_socket(self) -> Path:
        return self.sockets / "control.sock"

    @property
    def control_endpoint(self) -> str:
        """For zmq's bind and connect."""
        return f"ipc://{self.control_socket}"

    @property
    def segments_socket(self) -> Path:
        return self.sockets / "segments.sock"

    @property
    def secret_file(self) -> Path:
        return self.path / "secret"

    @property
    def lock_file(self) -> Path:
        return self.path / "coordinator.lock"

    @property
    def incarnations(self) -> Path:
        return self.path / "incarnations"


@dataclass(frozen=True)
class Holder:
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
    run_dir = RunDir(Path(os.path.abspath(path)))  # noqa: PTH100 - resolve() would follow links of the run's owner
    check_path(run_dir)
    try:
        run_dir.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_directory(run_dir.path, adopt_empty=True)
        lock_fd = _lock(run_dir, run_id)
    except OSError as error:
        raise _unusable(run_dir, error) from error
    try:
        for folder in (run_dir.sockets, run_dir.incarnations):
            folder.mkdir(mode=0o700, exist_ok=True)
            _check_directory(folder, adopt_empty=True)
        _clear(run_dir)
        return Claim(run_dir, lock_fd, _write_secret(run_dir))
    except OSError as error:
        os.close(lock_fd)
        raise _unusable(run_dir, error) from error
    except BaseException:
        os.close(lock_fd)
        raise


def attach(path: Path) -> RunDir:
    """The run directory as a worker uses it.

    Raises:
        ConfigError: it does not exist, is not ours, is open to others, or its path is too long.
    """
    run_dir = RunDir(Path(os.path.abspath(path)))  # noqa: PTH100
    check_path(run_dir)
    try:
        _check_directory(run_dir.path)
    except OSError as error:
        raise _unusable(run_dir, error) from error
    return run_dir


def read_secret(run_dir: RunDir) -> bytes:
    """The run's secret. In a run whose processes start in any order it may not be there yet: try again until your
    deadline, and read it again when a hello is refused for its secret.

    Raises:
        ConfigError: no such file (yet), a link, not a regular file, not ours, readable by others, or of a wrong size.
    """
    where = str(run_dir.secret_file)
    try:
        fd = os.open(run_dir.secret_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            "Run secret cannot be read", got=str(error), do="Start the coordinator on this run directory", where=where
        ) from error
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        mode = stat.S_IMODE(info.st_mode)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or mode & 0o077:
            raise ConfigError(
                "Run secret is not safe",
                got=f"{stat.filemode(info.st_mode)}, uid {info.st_uid}",
                needed=f"a regular file of uid {os.geteuid()} that nobody else can read",
                do="Remove it and start the coordinator again",
                where=where,
            )
        secret = file.read(SECRET_BYTES + 1)
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            "Run secret has a wrong size", got=f"{len(secret)} bytes", needed=f"{SECRET_BYTES} bytes", where=where
        )
    return secret


def next_incarnation(run_dir: RunDir, role: Role, device: Device) -> int:
    """The next unused incarnation of a place, from 1, across processes; for workers that no supervisor numbers.

    Raises:
        ConfigError: the counter cannot be read or written, or holds something else than a number.
    """
    path = run_dir.incarnations / f"{role}-{device.node}-{device.index}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "r+b") as file:
            fcntl.flock(fd, fcntl.LOCK_EX)  # held for the few lines below only
            text = file.read(32)
            if text and not text.isdigit():
                raise ConfigError("Incarnation counter is damaged", got=repr(text), needed="a number", where=str(path))
            number = int(text or b"0") + 1
            file.seek(0)
            file.write(str(number).encode())
            file.flush()
            os.fsync(fd)
            return number
    except OSError as error:
        raise _unusable(run_dir, error) from error


def check_path(run_dir: RunDir) -> None:
    """Whether sockets can live there at all; touches nothing.

    Raises:
        ConfigError: a socket's path would be too long, or the directory is on a network file system.
    """
    longest = max((run_dir.control_socket, run_dir.segments_socket), key=lambda path: len(os.fsencode(path)))
    size = len(os.fsencode(longest))
    if size > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            "Run directory's path is too long for a unix socket",
            got=f"{size} bytes in {longest}",
            needed=f"at most {MAX_SOCKET_PATH_BYTES} bytes",
            do=f"Choose a run directory whose path is {size - MAX_SOCKET_PATH_BYTES} bytes shorter",
            where=str(run_dir.path),
        )
    file_system = _file_system(run_dir.path)
    if file_system in _NETWORK_FILE_SYSTEMS:
        raise ConfigError(
            "Run directory is on a network file system",
            got=file_system,
            needed="a local one: sockets and locks of a run belong to one host",
            do="Choose a local run directory; checkpoints may stay on the network",
            where=str(run_dir.path),
        )


def _check_directory(path: Path, *, adopt_empty: bool = False) -> None:
    info = path.stat()
    if not stat.S_ISDIR(info.st_mode):
        raise ConfigError("Run directory is not a directory", got=stat.filemode(info.st_mode), where=str(path))
    if info.st_uid != os.geteuid():
        raise ConfigError(
            "Run directory belongs to somebody else",
            got=f"uid {info.st_uid}",
            needed=f"uid {os.geteuid()}",
            do="Choose another run directory, or run every process under one uid",
            where=str(path),
        )
    if stat.S_IMODE(info.st_mode) & 0o077:
        if adopt_empty and not any(path.iterdir()):
            path.chmod(0o700)  # a fresh volume or mktemp: nothing in it that others could have put there
            return
        raise ConfigError(
            "Run directory is open to others",
            got=f"mode {stat.S_IMODE(info.st_mode):04o}",
            needed="mode 0700",
            do=f"chmod 700 {path}",
            where=str(path),
        )


def _lock(run_dir: RunDir, run_id: str) -> int:
    fd = os.open(run_dir.lock_file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        note = os.pread(fd, _MAX_NOTE_BYTES, 0)
        os.close(fd)
        if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
            raise
        raise _held(run_dir, note) from error
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


def _file_system(path: Path) -> str:
    """Type of the file system that the nearest existing parent of `path` is on; "" if the kernel does not tell."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        device = path.stat().st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return ""


def _unusable(run_dir: RunDir, error: OSError) -> ConfigError:
    return ConfigError(
        "Run directory cannot be used",
        got=str(error),
        needed="a local directory that this user can write",
        do="Choose another run directory",
        where=str(run_dir.path),
    )
