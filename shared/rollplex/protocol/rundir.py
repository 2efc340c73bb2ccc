"""The run directory: who may open it, where its sockets are, and the run's secret. The worker's side.

    RUN/                 0700: the protection of the sockets (libzmq makes them as the umask says)
    RUN/coordinator.lock held with flock for the coordinator's life; names pid, host and run (see `claim`)
    RUN/secret           32 random bytes, 0600, new in each run
    RUN/incarnations/    one counter per place, for workers that no supervisor numbers
    RUN/sockets/control.sock    ROUTER of the coordinator
    RUN/sockets/segments.sock   AF_UNIX stream that passes segments

Owns the rules and their errors; knows nothing of messages. Filesystem paths only: anybody could connect to an abstract
socket.
"""

from __future__ import annotations

import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from rollplex.errors import ConfigError
from rollplex.protocol.common import Device, Role
from rollplex.protocol.handshake import SECRET_BYTES
from rollplex.texts import require_text

MAX_SOCKET_PATH_BYTES = 107
"""sun_path holds 108 bytes with the final NUL."""
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs"})
"""As the kernel names them; no run directory may be on one."""


@dataclass(frozen=True)
class RunDir:
    """One run directory. Making the object touches nothing."""

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


def attach(path: Path) -> RunDir:
    """The run directory as a worker uses it.

    Raises:
        ConfigError: as `check`.
    """
    run_dir = RunDir(path.absolute())
    check(run_dir)
    return run_dir


def check_path(run_dir: RunDir) -> None:
    """Whether sockets can live there at all; changes nothing.

    Raises:
        ConfigError: its path is no text, a socket's path would be too long, or it is on a network file system.
    """
    require_text(run_dir.path, "the run directory")
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
    file_system = file_system_of(run_dir.path)
    if file_system in NETWORK_FILE_SYSTEMS:
        raise ConfigError(
            "Run directory is on a network file system",
            got=file_system,
            needed="a local one: sockets and locks of a run belong to one host",
            do="Choose a local run directory; checkpoints may stay on the network",
            where=str(run_dir.path),
        )


def check(run_dir: RunDir) -> None:
    """Whether this process may trust and use the directory; changes nothing.

    Raises:
        ConfigError: as `check_path`; or it does not exist, is not a directory, is not ours, or is open to others.
    """
    check_path(run_dir)
    try:
        check_directory(run_dir.path)
    except OSError as error:
        raise unusable(run_dir.path, error) from error


def read_secret(run_dir: RunDir) -> bytes:
    """The run's secret. In a run whose processes start in any order it may not be there yet: try again until your
    deadline, and read it again when a hello is refused for its secret.

    Raises:
        ConfigError: as `check`; or no such file (yet), a link, not a regular file, not ours, readable by others,
            or of a wrong size.
    """
    check(run_dir)
    try:
        fd = os.open(run_dir.secret_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            "Run secret cannot be read",
            got=str(error),
            do="Start the coordinator on this run directory",
            where=str(run_dir.secret_file),
        ) from error
    with os.fdopen(fd, "rb") as file:
        _check_secret_file(os.fstat(fd), run_dir.secret_file)
        secret = file.read(SECRET_BYTES + 1)
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            "Run secret has a wrong size",
            got=f"{len(secret)} bytes" if len(secret) <= SECRET_BYTES else "more",
            needed=f"{SECRET_BYTES} bytes",
            where=str(run_dir.secret_file),
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
            fcntl.flock(fd, fcntl.LOCK_EX)  # held for these few lines only, by whoever holds it
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
        raise unusable(run_dir.path, error) from error


def check_directory(path: Path, *, adopt_empty: bool = False) -> None:
    """Whether a directory is ours and closed to others.

    Args:
        adopt_empty: close an empty one that is ours, such as a fresh volume: nothing is in it yet.

    Raises:
        ConfigError: it is not a directory, not ours, or open to others.
        OSError: it cannot be looked at.
    """
    info = path.stat()
    mode = stat.S_IMODE(info.st_mode)
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
    if mode & 0o077 and adopt_empty and not any(path.iterdir()):
        path.chmod(0o700)
    elif mode & 0o077:
        raise ConfigError(
            "Run directory is open to others",
            got=f"mode {mode:04o}",
            needed="mode 0700",
            do=f"chmod 700 {path}",
            where=str(path),
        )


def file_system_of(path: Path) -> str:
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


def unusable(path: Path, error: OSError) -> ConfigError:
    """What the operating system said about a run directory, as an error for the user."""
    return ConfigError(
        "Run directory cannot be used",
        got=str(error),
        needed="a local directory that this user can write",
        do="Choose another run directory",
        where=str(path),
    )


def _check_secret_file(info: os.stat_result, path: Path) -> None:
    if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and not stat.S_IMODE(info.st_mode) & 0o077:
        return
    raise ConfigError(
        "Run secret is not safe",
        got=f"{stat.filemode(info.st_mode)}, uid {info.st_uid}",
        needed=f"a regular file of uid {os.geteuid()} that nobody else can read",
        do="Remove it and start the coordinator again",
        where=str(path),
    )
