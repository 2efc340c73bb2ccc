"""Journal events as server-sent events, resumable by id.

    follower task    waits for: new rows (looks every poll_s), room in the client's socket
                     unblocked by: rows, the socket, the client's end, the server's stop
    watcher task     waits for: the client's end

A stream holds one batch of rows at most: while a client does not read, its task waits in `send`, and the rows wait in
the journal. So it costs no more than that batch, holds no lock in the database, and misses nothing once it reads on.
A keep-alive comment is sent when nothing else was. At the server's stop a stream first sends what is in the journal.
Knows nothing of what events mean; their ids are the journal's.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread
from msgspec import Struct
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollplex.journal.reader import Reader, Row
from rollplex_coordinator.http.errors import ConflictError, UnavailableError

READ_THREADS = 4
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]


class StreamSettings(Struct, frozen=True, kw_only=True):
    """How streams behave."""

    poll_s: float = 0.25
    keepalive_s: float = 15.0
    max_streams: int = 32
    batch_rows: int = 256
    batch_bytes: int = 256 * 1024
    retry_ms: int = 1_000
    """How long a browser waits before it connects again."""


class Streams:
    """All event streams of one server. `stop` may be called from any thread."""

    def __init__(self, journal_path: Path, settings: StreamSettings) -> None:
        self.journal_path = journal_path
        self.settings = settings
        self.open = 0
        self._stopping = threading.Event()
        self._limiter: anyio.CapacityLimiter | None = None

    @property
    def stopping(self) -> bool:
        """The server ends: streams send what there is and end too."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """End every stream after what is in the journal now."""
        self._stopping.set()

    @property
    def limiter(self) -> anyio.CapacityLimiter:
        """Threads for reading, apart from those in which calls of the core wait."""
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(READ_THREADS)
        return self._limiter


class EventStream(Response):
    """One client's stream of the events after an id.

    Args:
        streams: the server's.
        after: id of the last event that the client has.
        follow: False: end at the event that is the newest when the stream begins.
        last: begin with so many of the newest events instead; None: as `after` says.

    Raises:
        UnavailableError: too many streams are open, or the server ends.
        ConflictError: the client has an event that the journal does not: it is another journal.
        JournalError: the journal cannot be read.
    """

    def __init__(self, streams: Streams, *, after: int, follow: bool, last: int | None = None) -> None:
        super().__init__()
        self._streams = streams
        self._after = after
        self._follow = follow
        self._newest_only = last
        self._settings = streams.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        limit = self._settings.max_streams
        if self._streams.open >= limit or self._streams.stopping:
            reason = "the server ends" if self._streams.stopping else f"{self._streams.open} are open"
            raise UnavailableError(
                "no event stream to be had", got=reason, needed=f"less than {limit}", do="Try again later."
            )
        self._streams.open += 1
        try:
            with Reader(self._streams.journal_path) as reader:
                await self._stream(reader, receive, send)
        finally:
            self._streams.open -= 1

    async def _stream(self, reader: Reader, receive: Receive, send: Send) -> None:
        newest = await self._last_id(reader)
        if self._newest_only is not None:
            self._after = max(self._after, newest - self._newest_only)
        if self._after > newest:
            raise ConflictError(
                "the journal does not reach that event",
                got=f"event {self._after}",
                needed=f"at most {newest}, the newest",
                do="This is another journal than before: begin with after=0.",
            )
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await _send_part(send, f"retry: {self._settings.retry_ms}\n\n".encode())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_until_disconnect, receive, tasks.cancel_scope)
            await self._send_rows(reader, send, None if self._follow else newest)
            tasks.cancel_scope.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_rows(self, reader: Reader, send: Send, end: int | None) -> None:
        quiet_s = 0.0
        while end is None or self._after < end:
            if self._streams.stopping and end is None:
                end = await self._last_id(reader)
                continue
            rows = [row for row in await self._read(reader) if end is None or row.id <= end]
            if rows:
                await _send_part(send, b"".join(map(frame, rows)))
                self._after = rows[-1].id
                quiet_s = 0.0
                continue
            await asyncio.sleep(self._settings.poll_s)
            quiet_s += self._settings.poll_s
            if quiet_s >= self._settings.keepalive_s:
                await _send_part(send, b": still here\n\n")
                quiet_s = 0.0

    async def _read(self, reader: Reader) -> Sequence[Row]:
        settings = self._settings
        return await anyio.to_thread.run_sync(
            reader.rows_after, self._after, settings.batch_rows, settings.batch_bytes, limiter=self._streams.limiter
        )

    async def _last_id(self, reader: Reader) -> int:
        return await anyio.to_thread.run_sync(reader.last_id, limiter=self._streams.limiter)


def frame(row: Row) -> bytes:
    """One event: `id` is the journal's, `event` the type, `data` one line of JSON with times, step and the event."""
    step = "null" if row.step is None else row.step
    head = f'"id":{row.id},"wall_s":{row.wall_s!r},"monotonic_s":{row.monotonic_s!r},"step":{step}'
    return f'id: {row.id}\nevent: {row.type}\ndata: {{{head},"event":{row.payload}}}\n\n'.encode()


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})


async def _until_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
