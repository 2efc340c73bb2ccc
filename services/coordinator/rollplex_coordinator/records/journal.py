"""The journal: an append-only table of events in SQLite, with one writer and any number of readers.

Owns the file, its lock and what "on disk" means. Knows nothing of what an event stands for, nor of HTTP.

    core ──append──► buffer ──flush──► WAL ──(SQLite's checkpoint)──► main file
    core ──append_durable──► buffer + event ──► WAL ──fdatasync──► returns
    readers: a read-only connection each; they see whole transactions, in id order, and never block the writer

How an event reaches the disk. In WAL mode a commit appends pages to `<name>-wal`. Under `synchronous=NORMAL`, which
`flush` uses, SQLite does not sync the WAL at commit: the rows survive the death of this process (they are in the
kernel's page cache) but not the loss of power. Under `synchronous=FULL` SQLite calls fdatasync on the WAL before COMMIT
returns. The WAL is one file written in order, so that this also carries every earlier batch to the disk. The directory
entry of a new WAL is synced with its first header. (Seen with strace on SQLite 3.40: no sync in a NORMAL commit, one
fdatasync of the WAL in a FULL one, and at a checkpoint first the WAL, then the main file.) `synchronous` may not change
inside a transaction, so it is set before each BEGIN.

Ids are given out by the writer, one after the other, and are never reused; commits happen in id order. After a loss of
power the last NORMAL batches may be missing, and their ids are given out again.
"""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

from rollplex.errors import JournalError
from rollplex.journal.events import Durable, Event, JournalReplaced, encode, step_of, type_of
from rollplex.journal.reader import Reader, Row, journal_error
from rollplex_coordinator.records.journal_file import Damaged, lock_file, move_aside, open_file

__all__ = ["MAX_BUFFERED", "Journal", "Reader", "Row"]

MAX_BUFFERED = 512
"""`append` flushes by itself at this many events."""

# A batch that was committed, but interrupted before it left the buffer, is written again.
_INSERT = """INSERT INTO events (id, wall_s, monotonic_s, step, type, payload) VALUES (?, ?, ?, ?, ?, ?)
    ON CONFLICT (id) DO NOTHING"""

_Pending: TypeAlias = tuple[int, float, float, int | None, str, str]


class Journal:
    """The writer. Belongs to the thread that opened it.

    Args:
        path: the journal's file; created (mode 0600) where it is missing. Beside it lie `-wal`, `-shm` and `.lock`.

    Raises:
        JournalError: another process writes this journal, the file belongs to another program or version, or the
            host cannot keep it there. A file that SQLite finds damaged is not an error: it is renamed aside, a new
            journal begins with `JournalReplaced`, and `moved_aside` says where the old one is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.moved_aside: Path | None = None
        self._buffer: list[_Pending] = []
        self._closed = False
        self._lock = lock_file(path)
        try:
            self._connection, replaced = self._open()
        except BaseException:
            os.close(self._lock)
            raise
        with Reader(path) as reader:
            self._next = reader.last_id() + 1
        if replaced is not None:
            self.append_durable(replaced)

    @property
    def last_id(self) -> int:
        """Id of the newest event, buffered or written; 0 when there is none."""
        return self._next - 1

    @property
    def buffered(self) -> int:
        """Events that are only in memory."""
        return len(self._buffer)

    def append(self, event: Event) -> int:
        """Keep an event in memory until the next flush; returns its id.

        Raises:
            JournalError: the buffer was full and could not be written; the event is buffered all the same.
        """
        assert not isinstance(event, Durable), f"{type_of(event)} must be on disk at once: append_durable"
        event_id = self._buffer_event(event)
        if len(self._buffer) >= MAX_BUFFERED:
            self.flush()
        return event_id

    def append_durable(self, event: Event) -> int:
        """Write everything buffered and this event, in one transaction, and return its id once it is on the disk.

        Raises:
            JournalError: it could not be written, and never will be: what it announces must not happen. What was
                buffered before it stays buffered.
        """
        event_id = self._buffer_event(event)
        try:
            self._write(durable=True)
        except JournalError:
            self._buffer.pop()
            self._next -= 1
            raise
        return event_id

    def flush(self) -> None:
        """Write the buffered events in one transaction: safe from the death of this process, not from loss of power.

        Raises:
            JournalError: they could not be written, and stay buffered.
        """
        self._write(durable=False)

    def close(self) -> None:
        """Write what is buffered, durably, and let the next writer in. A second call does nothing.

        Raises:
            JournalError: the rest could not be written; the journal is closed all the same.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._write(durable=True)
        finally:
            self._connection.close()
            os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _buffer_event(self, event: Event) -> int:
        event_id = self._next
        row = (event_id, time.time(), time.monotonic(), step_of(event), type_of(event), encode(event))
        self._buffer.append(row)
        self._next += 1
        return event_id

    def _write(self, *, durable: bool) -> None:
        if not self._buffer:
            return
        run = self._connection.execute
        try:
            run(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            run("BEGIN IMMEDIATE")
            self._connection.executemany(_INSERT, self._buffer)
            run("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                run("ROLLBACK")
            raise journal_error(f"cannot write {len(self._buffer)} events", error, self.path) from error
        self._buffer.clear()

    def _open(self) -> tuple[sqlite3.Connection, JournalReplaced | None]:
        try:
            return open_file(self.path), None
        except Damaged as damage:
            self.moved_aside = move_aside(self.path)
            return open_file(self.path), JournalReplaced(moved_to=str(self.moved_aside), why=str(damage))
