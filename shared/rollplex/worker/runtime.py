"""The life of a service process: connect, load, serve until told to leave.

Owns signals, the exit code and how errors reach the coordinator. A service owns what its messages mean.

    exit code 0   told to leave, by the coordinator or by SIGTERM
    exit code 1   a unit failed, or the coordinator refused this process
    exit code 3   the coordinator ended; this process finished its unit, or was cut off after a grace time
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, runtime_checkable

from rollplex.errors import ProtocolError, RollplexError
from rollplex.memory.segment import backend
from rollplex.protocol.common import ErrorReport, Failed, Leave, Leaving, Role
from rollplex.worker.connection import ToldToLeave, connect_stream, watch
from rollplex.worker.messages import CoordinatorGone, MessageThread
from rollplex.worker.options import parse_options
from rollplex.worker.segments import Segments
from rollplex.worker.starter import Starter
from rollplex.worker.terms import Terms

EXIT_FAILED = 1
EXIT_COORDINATOR_GONE = 3
THREAD_SWITCH_S = 0.0005
MAX_PART_CHARS = 16_000

log = logging.getLogger("rollplex.worker")


class Service(Protocol):
    """What a worker does with instructions. One method, called from one thread, one message at a time."""

    def handle(self, message: Any, reply: Callable[[Any], None]) -> None:
        """Carry out one instruction; answer through `reply`, as the channel's module says."""
        ...


@runtime_checkable
class Closing(Protocol):
    """A service that holds what does not end with its process: it has `close` too, called once at the end, whatever
    the end is. Whoever takes longer for it than the coordinator's grace time is killed."""

    def close(self) -> None: ...


def report(error: BaseException) -> ErrorReport:
    """An error as it crosses the border: named, with its parts and where it was raised."""
    text = _sendable("".join(traceback.format_exception(error))[-MAX_PART_CHARS:])
    if isinstance(error, RollplexError):
        return ErrorReport(
            kind=type(error).__name__,
            what=_sendable(error.what),
            got=_sendable(error.got),
            needed=_sendable(error.needed),
            do=_sendable(error.do),
            where=_sendable(error.where),
            traceback=text,
        )
    return ErrorReport(kind=type(error).__name__, what=_sendable(f"{type(error).__name__}: {error}"), traceback=text)


def _sendable(text: str) -> str:
    """What a message can carry, whatever an error quotes: no longer than that, and no surrogates (of file names)."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_PART_CHARS else text[: MAX_PART_CHARS - 1] + "…"


def run(role: Role, make_service: Callable[[Segments], Service], argv: Sequence[str] | None = None) -> NoReturn:
    """Run one service process to its end.

    Args:
        role: which channel this process speaks.
        make_service: makes the service once the coordinator has accepted this process; imports what is heavy.
        argv: command line without the program's name; None takes the process's own.
    """
    options = parse_options(role, argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the coordinator's to handle
    terms = Terms()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # kill -USR1 writes every thread's stack to the log
    sys.setswitchinterval(THREAD_SWITCH_S)  # the message thread must not wait 5 ms for the interpreter
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {role} %(levelname)s %(message)s")
    starter = Starter(os.environ)
    try:
        run_dir, stream, hello, welcome = connect_stream(options, lambda: terms.came or starter.look())
    except ToldToLeave:
        log.info("%s before there was a coordinator", "its starter ended" if starter.gone else "told to leave")
        sys.exit(EXIT_COORDINATOR_GONE if starter.gone else 0)
    except RollplexError as error:
        log.error("%s", error)
        sys.exit(EXIT_FAILED)
    starter.close()
    log.info("pid %d joined run %s as incarnation %d", os.getpid(), welcome.run_id, options.incarnation)
    messages = MessageThread(run_dir.control_endpoint, hello, welcome.alive_every_s)
    terms.obey(lambda: _ask_to_leave(messages, welcome.grace_s))
    watch(stream, lambda: _coordinator_ended(messages, welcome.grace_s, terms))
    messages.start()
    code = _serve(messages, lambda: make_service(Segments(stream, backend, welcome.run_id, run_dir.path)))
    code = 0 if terms.came and code == EXIT_COORDINATOR_GONE else code
    if not messages.stop():
        log.error("the coordinator has not taken what this process had to say last")
    log.info("leaving with exit code %d", code)
    logging.shutdown()
    os._exit(code)  # no interpreter teardown: mapped tensors and their threads end with the process


def _serve(messages: MessageThread, make: Callable[[], Service]) -> int:
    cause = 0
    service: Service | None = None
    try:
        service = make()
        messages.starting = False
        while True:
            message = messages.inbox.get()
            if isinstance(message, BaseException):
                raise message
            if isinstance(message, Leave):
                log.info("told to leave: %s", message.reason)
                return 0
            if message.cause <= cause:
                raise ProtocolError(
                    "An instruction came twice, or late",
                    got=f"{type(message).__name__} with cause {message.cause}",
                    needed=f"a cause above {cause}",
                )
            cause = message.cause
            service.handle(message, messages.reply)
            messages.progress += 1
    except CoordinatorGone as error:
        log.warning("%s", error)
        return EXIT_COORDINATOR_GONE
    except Exception as error:
        log.exception("instruction %d failed", cause)
        messages.send(Failed(cause=cause, error=report(error)))
        return EXIT_FAILED
    finally:
        _close(service)


def _close(service: object) -> None:
    if isinstance(service, Closing):
        try:
            service.close()
        except RollplexError as error:
            log.error("%s", error)


def _coordinator_ended(messages: MessageThread, grace_s: float, terms: Terms) -> None:
    code = 0 if terms.came else EXIT_COORDINATOR_GONE
    if messages.starting:
        os._exit(code)
    messages.inbox.put(CoordinatorGone("the coordinator ended", do="Start the run again."))
    _cut_off(grace_s, code)


def _ask_to_leave(messages: MessageThread, grace_s: float) -> None:
    """SIGTERM asks the coordinator to stop the run; it answers with Leave, or its end ends this process."""
    messages.send(Leaving(reason=signal.SIGTERM.name))
    _cut_off(grace_s, 0)


def _cut_off(grace_s: float, code: int) -> None:
    """End this process after a while, whatever it does then."""
    cut = threading.Timer(grace_s, os._exit, (code,))
    cut.daemon = True
    cut.start()
