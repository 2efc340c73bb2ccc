"""uvicorn in a thread of its own, on a socket that was bound before anything else was done (`listening`).

    core's thread ──start──► HTTP thread: event loop ──sync routes──► worker threads ──Control──► core's mailbox
    start  waits for: the loop to accept           unblocked by: that, the thread's end, the deadline
    stop   waits for: requests and streams to end  unblocked by: that, uvicorn's patience, the deadline

Owns the thread, and the socket once it has it. Installs no signal handler (uvicorn does so in the main thread only) and
writes nothing to stdout; errors go to `logging`. The thread is a daemon: it never keeps a process alive.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from rollplex.errors import WaitError
from rollplex_coordinator.http.deps import streams_of

MAX_REQUESTS = 256
HEADERS_S = 10.0
"""How long a client may take to say what it wants."""
PATIENCE_S = 1
"""After a stop: how long requests and streams may go on before they are cancelled."""
_POLL_S = 0.01

_log = logging.getLogger(__name__)


class _Connection(H11Protocol):
    """One client. uvicorn waits for ever for the end of a request's headers: those that never end would take the places
    of all others."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    @property
    def _in_headers(self) -> bool:
        return self.conn.their_state is h11.IDLE

    def _watch(self) -> None:
        """From the first byte of a request, or the connection, to the end of its headers. Not reset by more of them."""
        if not self._in_headers:
            self._forget()
        elif self._late is None:
            self._late = self.loop.call_later(HEADERS_S, self._end)

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        if self._in_headers:
            self.transport.abort()


class _Uvicorn(uvicorn.Server):
    """uvicorn that leaves no connection behind: one whose client does not read never closes by itself."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # one turn of the loop: the aborted connections are told and closed


class Server:
    """One app on one listening socket, which it owns from here on."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        host, self.port = listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._streams = streams_of(app)
        self._listener = listener
        self._failure: BaseException | None = None
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=_Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=logging.CRITICAL,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=MAX_REQUESTS,
                timeout_graceful_shutdown=PATIENCE_S,
            )
        )
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self, deadline_s: float = 10.0) -> None:
        """Serve; returns once requests are accepted.

        Raises:
            WaitError: that did not happen in time, or the thread ended.
        """
        self._thread.start()
        until = time.monotonic() + deadline_s
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() >= until:
                raise WaitError(
                    "the HTTP thread does not serve",
                    got=repr(self._failure) if self._failure else f"nothing for {deadline_s:g} s",
                    where=self.url,
                )
            time.sleep(_POLL_S)

    def stop(self, deadline_s: float = 5.0) -> None:
        """End streams and requests, then the thread. May be called twice, and without `start`.

        Streams first send what is in the journal. What still runs after PATIENCE_S is cancelled; a call of the core
        that waits is not, so let those end first.

        Raises:
            WaitError: the thread did not end in time. It is a daemon and may be left.
        """
        if self._streams is not None:
            self._streams.stop()
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise WaitError(
                "the HTTP thread does not end",
                got=f"{0 if self._streams is None else self._streams.open} open streams after {deadline_s:g} s",
                needed="every call of the core to end",
                where=self.url,
            )
        self._listener.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except BaseException as failure:  # noqa: BLE001 - the thread's outer loop; `start` shows it
            self._failure = failure
            _log.exception("the HTTP thread ended")
