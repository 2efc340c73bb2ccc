"""How a worker finds its coordinator and says who it is.

Owns the two handshakes: on the stream that passes descriptors (whose end of file is the death notice, both ways) and
on the message socket. Knows nothing of what is sent afterwards.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable

from rollplex.errors import ProtocolError, WaitError
from rollplex.memory.fds import recv, send
from rollplex.protocol.handshake import (
    FROM_COORDINATOR,
    HELLO,
    PROTOCOL_VERSION,
    Hello,
    Refused,
    Welcome,
    schema_hash,
)
from rollplex.protocol.rundir import RunDir
from rollplex.worker.options import WorkerOptions

HANDSHAKE_DEADLINE_S = 10.0
RETRY_S = 0.05


def make_hello(options: WorkerOptions, run_dir: RunDir) -> Hello:
    """Who this process is, with the run's secret from its 0600 file."""
    return Hello(
        protocol=PROTOCOL_VERSION,
        schema_hash=schema_hash(options.role),
        role=options.role,
        device=options.device,
        incarnation=options.incarnation,
        secret=run_dir.read_secret(),
        pid=os.getpid(),
    )


def connect_stream(options: WorkerOptions) -> tuple[socket.socket, Hello, Welcome]:
    """Connect to the holder's socket and introduce this process; waits for a coordinator that is still starting.

    Raises:
        WaitError: no coordinator listens there within the deadline.
        ProtocolError: the coordinator refused this process; says why, with both values.
    """
    run_dir = RunDir(options.run_dir)
    deadline = time.monotonic() + options.connect_deadline_s
    while True:
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.connect(str(run_dir.segments_socket))
            break
        except (FileNotFoundError, ConnectionRefusedError) as error:
            stream.close()
            if time.monotonic() >= deadline:
                raise WaitError(
                    "no coordinator answers",
                    got=f"{error.strerror} after {options.connect_deadline_s:.0f} s",
                    needed=f"a coordinator listening at {run_dir.segments_socket}",
                    do="Start the coordinator first, or check that both see the same run directory.",
                    where=str(options.role),
                ) from error
            time.sleep(RETRY_S)
    hello = make_hello(options, run_dir)
    send(stream, HELLO.encode(hello), (), HANDSHAKE_DEADLINE_S)
    payload, _ = recv(stream, HANDSHAKE_DEADLINE_S, 65_536, 0)
    match answer := FROM_COORDINATOR.decode(payload):
        case Welcome():
            return stream, hello, answer
        case Refused():
            raise ProtocolError(
                f"the coordinator refused this process: {answer.reason}",
                got=answer.yours,
                needed=answer.ours,
                do=answer.do,
                where=str(options.role),
            )


def watch(stream: socket.socket, on_end: Callable[[], None]) -> None:
    """Call `on_end` from a thread of its own once the coordinator's end of `stream` is closed."""

    def wait() -> None:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        poll.poll()  # without deadline on purpose: the end of the stream is what this thread is for
        on_end()

    threading.Thread(target=wait, name="coordinator-watch", daemon=True).start()
