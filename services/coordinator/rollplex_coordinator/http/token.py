"""The API's bearer token: 256 random bits in a file that only its owner can read.

Owns the file. The token never appears in a log, an error or an address.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from rollplex.errors import ConfigError

MIN_CHARACTERS = 32
MAX_BYTES = 4_096


def create_or_read(path: Path) -> str:
    """The token in the file at `path`, made (mode 0600) where the file is missing.

    A new file appears under its name only when it is whole.

    Raises:
        ConfigError: the file is a link, is readable by others, belongs to another user, or holds no token; or it
            cannot be made.
    """
    try:
        if not os.path.lexists(path):
            _create(path)
        return _read(path)
    except OSError as error:
        raise ConfigError("cannot use the token's file", got=str(error), where=str(path)) from error


def _create(path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another process was faster: its token is the one
            os.link(temporary, path)
    finally:
        temporary.unlink()


def _read(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o077 or info.st_uid != os.geteuid():
            raise ConfigError(
                "the token's file is open to others",
                got=f"mode {stat.filemode(info.st_mode)}, owner {info.st_uid}",
                needed=f"a plain file of mode 0600 that belongs to user {os.geteuid()}",
                do="Delete it; the next start makes a new one.",
                where=str(path),
            )
        text = file.read(MAX_BYTES).decode("ascii", "replace").strip()
    if len(text) < MIN_CHARACTERS or not text.isascii() or any(character.isspace() for character in text):
        raise ConfigError(
            "the token's file holds no token",
            got=f"{len(text)} characters",
            needed=f"at least {MIN_CHARACTERS} ASCII characters without spaces",
            do="Delete it; the next start makes a new one.",
            where=str(path),
        )
    return text
