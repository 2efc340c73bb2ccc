"""How a worker finds its coordinator and says who it is.

Owns the handshake on the stream that passes descriptors, whose end of file is the death notice, both ways. Knows
nothing of what is sent afterwards.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable

from rollplex.errors import ConfigError, WaitError
from rollplex.memory.fds import recv, send
from rollplex.protocol.handshake import (
    MAX_HANDSHAKE_BYTES,
    Hello,
    Reason,
    Refused,
    Welcome,
    decode_answer,
    encode_handshake,
    make_hello,
)
from rollplex.protocol.rundir import RunDir, attach, check_path, read_secret
from rollplex.worker.options import WorkerOptions

FRAME_DEADLINE_S = 10.0
"""For a frame that has begun."""
RETRY_S = 0.05


class ToldToLeave(Exception):  # noqa: N818 - an event, not an error
    """SIGTERM came while there was no coordinator yet."""


def connect_stream(
    options: WorkerOptions, told_to_leave: Callable[[], object] = lambda: False
) -> tuple[RunDir, socket.socket, Hello, Welcome]:
    """Connect to the holder's socket and introduce this process; waits for a coordinator that starts or is busy.

    Args:
        told_to_leave: asked again and again.

    Raises:
        ToldToLeave: `told_to_leave` said so.
        ConfigError: no socket can live in this run directory.
        WaitError: no coordinator lets this process in within the deadline; says what the last try saw.
        ProtocolError: the coordinator refused this process; says why, with both values.
    """
    check_path(RunDir(options.run_dir.absolute()))
    deadline = time.monotonic() + options.connect_deadline_s
    while True:
        try:
            return _try_connect(options, lambda: bool(told_to_leave()) or time.monotonic() >= deadline)
        except (ConfigError, FileNotFoundError, ConnectionError, EOFError, _OldSecret, _NoAnswer) as error:
            if told_to_leave():
                raise ToldToLeave from error
            if time.monotonic() >= deadline:
                raise WaitError(
                    "no coordinator answers",
                    got=f"{error} after {options.connect_deadline_s:.0f} s",
                    needed=f"a coordinator on the run directory {options.run_dir}",
                    do="Start the coordinator, or check that both see the same run directory.",
                    where=str(options.role),
                ) from error
            time.sleep(RETRY_S)


class _OldSecret(Exception):  # noqa: N818 - a reason to read the file again, never seen outside
    """A new run has replaced the secret between reading it and saying it."""


class _NoAnswer(Exception):  # noqa: N818 - never seen outside
    """A coordinator is there, and has not looked at this process yet."""


def _try_connect(options: WorkerOptions, give_up: Callable[[], bool]) -> tuple[RunDir, socket.socket, Hello, Welcome]:
    run_dir = attach(options.run_dir)
    hello = make_hello(options.role, options.device, options.incarnation, read_secret(run_dir))
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        stream.connect(str(run_dir.segments_socket))
        send(stream, encode_handshake(hello), (), FRAME_DEADLINE_S)
        _await_answer(stream, give_up)
        payload, _ = recv(stream, FRAME_DEADLINE_S, MAX_HANDSHAKE_BYTES, 0)
        match answer := decode_answer(payload):
            case Welcome():
                return run_dir, stream, hello, answer
            case Refused(reason=Reason.SECRET):
                raise _OldSecret("refused for its secret")
            case Refused():
                raise answer.error()
    except BaseException:
        stream.close()
        raise


def _await_answer(stream: socket.socket, give_up: Callable[[], bool]) -> None:
    """A coordinator that is busy is not given up before `give_up` says so, whatever a frame may take."""
    poll = select.poll()
    poll.register(stream.fileno(), select.POLLIN)
    while not poll.poll(RETRY_S * 1000):
        if give_up():
            raise _NoAnswer("it has not answered the hello")


def watch(stream: socket.socket, on_end: Callable[[], None]) -> None:
    """Call `on_end` from a thread of its own once the coordinator's end of `stream` is closed."""

    def wait() -> None:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        poll.poll()  # without deadline on purpose: the end of the stream is what this thread is for
        on_end()

    threading.Thread(target=wait, name="coordinator-watch", daemon=True).start()
