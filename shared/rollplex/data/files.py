"""Opening files that a dataset names, without trusting the dataset.

Owns the rule which file may be opened: a regular file, under one folder after all symbolic links are followed. Opens
nothing else, not even to look: a FIFO, a device or a path that leads outside is refused by name and type alone.
Does not know what is in a file.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from rollplex.errors import DataError

MAX_NAME_BYTES = 4096
"""Linux' PATH_MAX; longer names cannot be opened anyway."""
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|(?:data|file):", re.ASCII)
_TYPES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link",
}


def open_regular(path: Path) -> int:
    """Open a file that the user's configuration names, for reading.

    Returns:
        A file descriptor, closed on exec.

    Raises:
        DataError: absent, unreadable, or not a regular file.
    """
    try:
        return _open(path.resolve(strict=True), str(path))
    except (OSError, RuntimeError) as error:
        raise _unopened(str(path), error) from error


def open_beneath(root: Path, name: str) -> int:
    """Open the file that a row names, for reading.

    Args:
        root: the folder that the file must be in; resolved already (`Path.resolve`).
        name: as the row has it, relative to `root`.

    Returns:
        A file descriptor, closed on exec.

    Raises:
        DataError: the name is a URL, absolute, too long, has a NUL, leads out of `root`, or is not a regular file.
    """
    _check_name(name)
    try:
        path = (root / name).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
        raise _unopened(name, error) from error
    if not path.is_relative_to(root):
        raise DataError(
            "This path leads out of the image folder",
            got=_shown(name),
            needed=f"a file under {root}, symbolic links followed",
            do="Move the file there, or set image_dir to a folder above it.",
        )
    try:
        return _open(path, name)
    except OSError as error:
        raise _unopened(name, error) from error


def _open(path: Path, name: str) -> int:
    """`path` has no symbolic links; if it got one since it was resolved, this refuses."""
    seen = path.lstat()
    if not stat.S_ISREG(seen.st_mode):
        raise DataError(
            "This is not a file",
            got=f"{_shown(name)}, {_TYPES.get(stat.S_IFMT(seen.st_mode), 'something else')}",
            needed="a regular file",
        )
    fd = os.open(path, _FLAGS)
    now = os.fstat(fd)
    if (now.st_dev, now.st_ino) != (seen.st_dev, seen.st_ino) or Path(f"/proc/self/fd/{fd}").readlink() != path:
        os.close(fd)
        raise DataError("This file was replaced while it was being opened", got=_shown(name))
    return fd


def _check_name(name: str) -> None:
    problem = ""
    if not name:
        problem = "an empty name"
    elif "\0" in name:
        problem = f"{_shown(name)}, with a NUL character"
    elif len(os.fsencode(name)) > MAX_NAME_BYTES:
        problem = f"{_shown(name)}, {len(os.fsencode(name))} bytes long"
    elif _URL.match(name):
        problem = f"{_shown(name)}, a URL; nothing is fetched"
    elif name.startswith("/"):
        problem = f"{_shown(name)}, an absolute path"
    if problem:
        raise DataError("This is not the path of an image", got=problem, needed="a path relative to image_dir")


def _unopened(name: str, error: OSError | RuntimeError) -> DataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else "a loop of symbolic links"
    return DataError("This file cannot be opened", got=f"{_shown(name)}: {reason}", needed="a readable file")


def _shown(name: str) -> str:
    """A name as an error shows it: quoted, escaped, cut."""
    return repr(name if len(name) <= 200 else f"{name[:160]}…{name[-20:]}")
