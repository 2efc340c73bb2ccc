"""The journal's file: made, checked, locked, renamed aside where it is damaged.

Owns the schema, the single writer's lock and what "ours and whole" means. Knows nothing of events.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sqlite3
from pathlib import Path

from rollplex.errors import JournalError
from rollplex.journal.reader import BUSY_S, journal_error

APPLICATION_ID = 0x526F6C70
"""Marks the file as a journal of Rollplex ("Rolp")."""
SCHEMA_VERSION = 1

_TABLE = """CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY,
    wall_s REAL NOT NULL,
    monotonic_s REAL NOT NULL,
    step INTEGER,
    type TEXT NOT NULL,
    payload TEXT NOT NULL
)"""
_SCHEMA = (
    _TABLE,
    "CREATE INDEX IF NOT EXISTS events_step ON events (step, id)",
    "CREATE INDEX IF NOT EXISTS events_started ON events (step) WHERE type = 'IterationStarted'",
    f"PRAGMA application_id={APPLICATION_ID}",
    f"PRAGMA user_version={SCHEMA_VERSION}",
)
_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Damaged(Exception):  # noqa: N818 - it says what the file is
    """SQLite finds the file damaged; the text says how."""


def open_file(path: Path) -> sqlite3.Connection:
    """A connection for writing to a journal that is whole and ours, made (mode 0600) where it is missing.

    Raises:
        Damaged: SQLite finds the file damaged.
        JournalError: the file belongs to another program or version, or the host cannot keep it there.
    """
    connection: sqlite3.Connection | None = None
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        problems = [str(row[0]) for row in connection.execute("PRAGMA quick_check(3)")]
        if problems != ["ok"]:
            raise Damaged("; ".join(problems))
        _check_ours(connection, path)
        _prepare(connection, path)
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _CORRUPT:
            raise Damaged(str(error)) from error
        if isinstance(error, sqlite3.Error | OSError):
            raise journal_error("cannot open the journal", error, path) from error
        raise
    return connection


def _check_ours(connection: sqlite3.Connection, path: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (objects,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if (application, version) != (APPLICATION_ID, SCHEMA_VERSION) and (application, version, objects) != (0, 0, 0):
        raise JournalError(
            "this file is no journal of this version of Rollplex",
            got=f"application id {application:#x}, version {version}, {objects} tables and indexes",
            needed=f"application id {APPLICATION_ID:#x}, version {SCHEMA_VERSION}",
            do="Use another run directory, or the version of Rollplex that wrote it.",
            where=str(path),
        )


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
    if mode != "wal":
        raise JournalError(
            "the journal's file system has no shared memory for SQLite's write-ahead log",
            got=f"journal mode {mode}",
            needed="wal",
            do="Put the run directory on a local file system.",
            where=str(path),
        )
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("BEGIN IMMEDIATE")
    for statement in _SCHEMA:
        connection.execute(statement)
    connection.execute("COMMIT")
    connection.execute("PRAGMA synchronous=NORMAL")
    _sync_folder(path)


def move_aside(path: Path) -> Path:
    """Rename a damaged journal and return where it is now.

    Its log goes first: stopped in between, the main file is still damaged, and no log waits for a new main file.
    """
    number = 1
    while any(Path(f"{path}{part}.corrupt-{number}").exists() for part in ("", "-wal", "-shm")):
        number += 1
    for part in ("-wal", "-shm", ""):
        source = Path(f"{path}{part}")
        if source.exists():
            source.rename(f"{source}.corrupt-{number}")
    _sync_folder(path)
    return Path(f"{path}.corrupt-{number}")


def _sync_folder(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def lock_file(path: Path) -> int:
    """The single writer's lock, in a file of its own; closing the returned descriptor gives it up.

    Not on the journal itself: closing any descriptor of a file gives up all POSIX locks that this process has on it,
    SQLite's too. The kernel lets go when the writer dies.

    Raises:
        JournalError: another process has it; names that process.
    """
    lock_path = Path(f"{path}.lock")
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise journal_error("cannot open the journal's lock", error, lock_path) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 4_096, 0).decode(errors="replace").strip()
        os.close(lock)
        raise JournalError(
            "another process writes this journal",
            got=holder or "a writer that has not said who it is",
            needed="one writer",
            do="Stop the other coordinator, or use another run directory.",
            where=str(path),
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return lock
