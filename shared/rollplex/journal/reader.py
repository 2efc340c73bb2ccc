"""Reading the journal: read-only connections that see whole transactions and never hold the writer up.

Owns the queries. Knows nothing of the writer's buffer: an event is seen once its batch is flushed. Every read is one
short transaction with a bound on rows and bytes, so that a reader that stalls keeps no lock and no memory.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import quote

from msgspec import Struct

from rollplex.errors import JournalError
from rollplex.journal.events import Event, Record, decode

BUSY_S = 5.0
EventT = TypeVar("EventT")
_COLUMNS = "id, wall_s, monotonic_s, step, type, payload"


class Row(Struct, frozen=True, kw_only=True):
    """An event as stored: `payload` is its JSON, not decoded."""

    id: int
    wall_s: float
    monotonic_s: float
    step: int | None
    type: str
    payload: str

    def record(self) -> Record:
        """The typed event.

        Raises:
            JournalError: the payload is not an event of this version.
        """
        return Record(
            id=self.id,
            wall_s=self.wall_s,
            monotonic_s=self.monotonic_s,
            step=self.step,
            event=decode(self.payload),
        )


class Reader:
    """One read-only connection. May be used from any thread, by one at a time.

    Args:
        path: the journal's file, which must exist.

    Raises:
        JournalError: from every method, where the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._explained():
            self._connection = sqlite3.connect(
                f"file:{quote(os.fsencode(path))}?mode=ro",
                uri=True,
                timeout=BUSY_S,
                isolation_level=None,
                check_same_thread=False,
            )

    def last_id(self) -> int:
        """Id of the newest written event; 0 when there is none."""
        with self._explained():
            (newest,) = self._connection.execute("SELECT max(id) FROM events").fetchone()
        return int(newest or 0)

    def rows_after(self, after: int, limit: int, max_bytes: int = 2**20) -> list[Row]:
        """At most `limit` rows with an id above `after`, in order.

        Ends early when their payloads together reach `max_bytes`, but never empty while there are rows.
        """
        query = f"SELECT {_COLUMNS} FROM events WHERE id > ? ORDER BY id LIMIT ?"  # noqa: S608 - our own column names
        rows: list[Row] = []
        size = 0
        with self._explained():
            cursor = self._connection.execute(query, (after, limit))
            try:
                for row in _rows(cursor):
                    rows.append(row)
                    size += len(row.payload)
                    if size >= max_bytes:
                        break
            finally:
                cursor.close()
        return rows

    def events_after(self, after: int, limit: int) -> list[Record]:
        """At most `limit` typed events with an id above `after`, in order."""
        return [row.record() for row in self.rows_after(after, limit)]

    def events_of_step(self, step: int) -> list[Record]:
        """All typed events of one step, in order."""
        query = f"SELECT {_COLUMNS} FROM events WHERE step = ? ORDER BY id"  # noqa: S608 - our own column names
        with self._explained():
            rows = list(_rows(self._connection.execute(query, (step,))))
        return [row.record() for row in rows]

    def events_of_type(self, kind: type[Event]) -> list[Record]:
        """All events of one type, in order."""
        query = f"SELECT {_COLUMNS} FROM events WHERE type = ? ORDER BY id"  # noqa: S608 - our own column names
        with self._explained():
            rows = list(_rows(self._connection.execute(query, (kind.__name__,))))
        return [row.record() for row in rows]

    def newest(self, kind: type[EventT], after: int = 0) -> tuple[Row, EventT] | None:
        """The last event of one type with an id above `after`, as stored and typed; None if there is none."""
        query = f"SELECT {_COLUMNS} FROM events WHERE type = ? AND id > ? ORDER BY id DESC LIMIT 1"  # noqa: S608 - ours
        with self._explained():
            rows = list(_rows(self._connection.execute(query, (kind.__name__, after))))
        if not rows:
            return None
        event = rows[0].record().event
        assert isinstance(event, kind), "the tag of an event is the name of its class"
        return rows[0], event

    def steps(self, first: int, limit: int) -> list[int]:
        """At most `limit` numbers of started steps from `first` on, in order."""
        query = "SELECT DISTINCT step FROM events WHERE type = 'IterationStarted' AND step >= ? ORDER BY step LIMIT ?"
        with self._explained():
            return [int(step) for (step,) in self._connection.execute(query, (first, limit))]

    def step_range(self) -> tuple[int, int] | None:
        """The first and the last step that were started; None: none was."""
        query = "SELECT {}(step) FROM events WHERE type = 'IterationStarted'"
        with self._explained():
            first, last = (self._connection.execute(query.format(end)).fetchone()[0] for end in ("min", "max"))
        return None if first is None else (int(first), int(last))

    def start_of(self, step: int) -> int:
        """Id of the last time at which a step was started; 0: it was not."""
        query = "SELECT max(id) FROM events WHERE type = 'IterationStarted' AND step = ?"
        with self._explained():
            (found,) = self._connection.execute(query, (step,)).fetchone()
        return int(found or 0)

    def start_after(self, step: int) -> int | None:
        """Id of the first start of any step after that of this one; None: there is none yet."""
        query = "SELECT min(id) FROM events WHERE type = 'IterationStarted' AND id > ?"
        with self._explained():
            (found,) = self._connection.execute(query, (self.start_of(step),)).fetchone()
        return None if found is None else int(found)

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise journal_error("cannot read the journal", error, self._path) from error


def journal_error(what: str, error: sqlite3.Error | OSError, path: Path) -> JournalError:
    """A database's or the system's error as ours, with what the user can do about the common ones."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    hints = {
        sqlite3.SQLITE_FULL: "Free space on that file system.",
        sqlite3.SQLITE_IOERR: "Look at the file system and its free space.",
        sqlite3.SQLITE_BUSY: "End the other program that has the file open for writing.",
        sqlite3.SQLITE_READONLY: "Make the run directory writable.",
        sqlite3.SQLITE_CANTOPEN: "Make sure that the run directory exists and is writable.",
    }
    return JournalError(
        what, got=str(error), needed="a readable and writable file", do=hints.get(code, ""), where=str(path)
    )


def _rows(cursor: Iterable[tuple[int, float, float, int | None, str, str]]) -> Iterator[Row]:
    for event_id, wall_s, monotonic_s, step, kind, payload in cursor:
        yield Row(id=event_id, wall_s=wall_s, monotonic_s=monotonic_s, step=step, type=kind, payload=payload)
