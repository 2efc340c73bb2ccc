"""The coordinator's line to its workers: instructions with cause ids out, typed answers in, every wait with a deadline.

Owns who has joined, what is awaited, and the one place where the event loop turns (`pump`). What an answer means is
the business of whoever registered for its type with `on`.

    pump(until) waits for: messages, deaths, signals, control requests.   unblocked by: `until()`, or an error.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

from rollplex.errors import ProtocolError, RollplexError, ServiceDied, StateError
from rollplex.protocol.common import Alive, Device, ErrorReport, Failed, Leave, Leaving, Received, Role
from rollplex.protocol.rollout import GroupFinished, Prefilled
from rollplex_coordinator.decisions.waits import Wait, Waits
from rollplex_coordinator.processes.hub import Arrived, Event, Gone, Hub, Joined, Peer, Ready, Unreachable
from rollplex_coordinator.processes.stop import StopRun
from rollplex_coordinator.processes.supervisor import Supervisor

IDLE_TICK_S = 0.5
LAST_WORDS_S = 0.3
ENDING_TICK_S = 0.02
PATIENCE_S = 3.0
"""How long an update from BEGIN to COMMIT, or a checkpoint, holds back a stop."""
AnswerT = TypeVar("AnswerT")

log = logging.getLogger("rollplex.coordinator")


class WorkerFailed(RollplexError):  # noqa: N818 - it names what happened
    """A worker reported an error; carries the worker's own parts."""

    def __init__(self, peer: Peer, report: ErrorReport) -> None:
        super().__init__(report.what, got=report.got, needed=report.needed, do=report.do, where=report.where)
        self.peer = peer
        self.report = report


class WorkerDied(ServiceDied):
    """A worker's process ended while it was needed."""

    def __init__(self, what: str, *, role: Role, got: str, needed: str, do: str, where: str) -> None:
        super().__init__(what, got=got, needed=needed, do=do, where=where)
        self.role = role


class Link:
    """Instructions and answers.

    Args:
        hub: the sockets.
        supervisor: for how a dead child ended and where its log is.
        ack_s: deadline for a worker's message thread to acknowledge an instruction.
        clock: CLOCK_MONOTONIC, seconds.
    """

    def __init__(
        self, hub: Hub, supervisor: Supervisor, ack_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.hub = hub
        self.waits = Waits()
        self._supervisor = supervisor
        self._ack_s = ack_s
        self._clock = clock
        self._peers: dict[Role, Peer] = {}
        self._heard: dict[Role, float] = {}
        self._next_cause = 1
        self._handlers: dict[type, Callable[[Peer, Any], None]] = {}
        self._ready: dict[str, Callable[[], None]] = {}
        self._events: deque[Event] = deque()
        self._stop: StopRun | None = None
        self._stop_asked_s = 0.0
        self._atomic = False
        self.after_turn: Callable[[], None] = lambda: None
        self.on_joined: Callable[[Peer], None] = lambda _: None
        self.on_gone: Callable[[Peer, str], None] = lambda _peer, _how: None

    # --- who is there ---------------------------------------------------------------------------------------------

    @property
    def peers(self) -> dict[Role, Peer]:
        """Workers that can be instructed."""
        return dict(self._peers)

    def watch(self, fd: int, tag: str, handler: Callable[[], None]) -> None:
        """Call `handler` whenever `fd` is readable."""
        self._ready[tag] = handler
        self.hub.watch(fd, tag)

    def unwatch(self, fd: int, tag: str) -> None:
        """Undo `watch`."""
        self._ready.pop(tag, None)
        self.hub.unwatch(fd)

    def heard_s(self, role: Role) -> float | None:
        """When the role's last message arrived, by this link's clock; None before the first."""
        return self._heard.get(role)

    def await_peers(self, roles: Iterable[Role], deadline_s: float) -> None:
        """Pump until every role has joined.

        Raises:
            WaitError: names the first that has not come in time.
        """
        now = self._clock()
        waits: dict[Role, int] = {}
        for role in roles:
            if role not in self._peers:
                waits[role] = self._new_cause()
                self.waits.add(
                    cause=waits[role],
                    what="join the run",
                    peer=f"{role}[{Device()}]",
                    now_s=now,
                    ack_s=None,
                    section_s=deadline_s,
                )

        def all_there() -> bool:
            for role in [role for role in waits if role in self._peers]:
                self.waits.answered(waits.pop(role), f"{role}[{Device()}]")
            return not waits

        self.pump(all_there)

    def leave_all(self, reason: str) -> None:
        """Tell every worker to leave; errors are logged, not raised, since the run is ending."""
        self.waits.clear()
        for peer in self._peers.values():
            try:
                self.hub.send(peer, Leave(reason=reason))
            except ProtocolError as error:
                log.debug("%s is gone already: %s", peer, error)

    def await_ends(self, deadline_s: float, children_run: Callable[[], bool]) -> list[Peer]:
        """After `leave_all`: wait until all streams have ended and no child runs; returns who is still there.

        Descriptors are served meanwhile: a worker that waits for one could not leave. Nothing else is handled any more.
        Whoever is told to leave must not see the end of this coordinator first.
        """
        self.hub.unwatch_all()
        end = self._clock() + deadline_s
        while (self._peers or children_run()) and (left := end - self._clock()) > 0:
            for event in self.hub.poll(min(left, ENDING_TICK_S)):
                if isinstance(event, Gone):
                    self._peers.pop(event.peer.role, None)
        return list(self._peers.values())

    # --- stops ----------------------------------------------------------------------------------------------------

    def stop(self, request: StopRun | None) -> None:
        """End the run at the next turn of the loop, or after the atomic section; the first request counts."""
        if self._stop is None and request is not None:
            self._stop = request
            self._stop_asked_s = self._clock()

    def begin_atomic(self) -> None:
        """From here on a stop waits, but no longer than PATIENCE_S. Deadlines and deaths are not held back."""
        self._atomic = True

    def end_atomic(self) -> None:
        """A stop that waits takes effect at the next turn."""
        self._atomic = False

    def _obey_stop(self) -> None:
        if self._stop is not None and not (self._atomic and self._clock() - self._stop_asked_s < PATIENCE_S):
            raise self._stop

    # --- instructions and answers ---------------------------------------------------------------------------------

    def on(self, kind: type[AnswerT], handler: Callable[[Peer, AnswerT], None]) -> None:
        """Give answers of this type to `handler` from now on; a later registration replaces it."""
        self._handlers[kind] = handler

    def ask(self, role: Role, make: Callable[[int], Any], what: str, section_s: float) -> int:
        """Send the instruction that `make(cause)` builds; its answer goes to the handler of its type.

        Raises:
            ProtocolError: the worker has not joined, or does not read.
            WorkerFailed, ServiceDied: it has ended, which the end of its stream will say only later.
        """
        peer = self._peers.get(role)
        if peer is None:
            raise ProtocolError("cannot instruct a worker that has not joined", got=what, where=str(role))
        cause = self._new_cause()
        try:
            self.hub.send(peer, make(cause))
            reached = True
        except Unreachable:
            reached = False
        self.waits.add(
            cause=cause, what=what, peer=str(peer), now_s=self._clock(), ack_s=self._ack_s, section_s=section_s
        )
        if not reached:
            self._gone(peer)
        return cause

    def call(
        self, role: Role, make: Callable[[int], Any], what: str, section_s: float, answer: type[AnswerT]
    ) -> AnswerT:
        """`ask`, and pump until its answer is there."""
        return self.call_many({role: make}, what, section_s, answer)[role]

    def call_many(
        self,
        instructions: dict[Role, Callable[[int], Any]],
        what: str,
        section_s: float,
        answer: type[AnswerT],
        heard: Callable[[Peer], None] = lambda _: None,
    ) -> dict[Role, AnswerT]:
        """`call` to several workers at once; `heard` is told of each answer when it comes."""
        answers: dict[Role, AnswerT] = {}

        def keep(peer: Peer, message: AnswerT) -> None:
            answers[peer.role] = message
            heard(peer)

        before = self._handlers.get(answer)
        self.on(answer, keep)
        for role, make in instructions.items():
            self.ask(role, make, what, section_s)
        self.pump(lambda: len(answers) == len(instructions))
        if before is not None:
            self._handlers[answer] = before
        return answers

    # --- the loop -------------------------------------------------------------------------------------------------

    def pump(self, until: Callable[[], bool]) -> None:
        """Handle events until `until()` holds.

        Raises:
            WaitError: a deadline passed.
            WorkerFailed, ServiceDied: a worker failed or ended.
            StopRun: somebody asked for the end of the run.
        """
        while not until():
            deadline = self.waits.next_deadline()
            timeout = IDLE_TICK_S if deadline is None else min(IDLE_TICK_S, deadline - self._clock())
            if not self._events:
                self._events.extend(self.hub.poll(max(0.0, timeout)))
            # A handler may pump itself: whoever turns the loop goes on with the same queue, so order is kept.
            while self._events:
                self._handle(self._events.popleft())
                if until():
                    break
            self.waits.check(self._clock())
            self.after_turn()
            self._obey_stop()

    def _handle(self, event: Event) -> None:
        if isinstance(event, Arrived | Gone) and self._peers.get(event.peer.role, event.peer) != event.peer:
            return  # of a process that has been replaced
        match event:
            case Joined(peer=peer):
                self._peers[peer.role] = peer
                self.on_joined(peer)
            case Arrived(peer=peer, message=message):
                self._arrived(peer, message)
            case Gone(peer=peer):
                self._gone(peer)
            case Ready(tag=tag):
                self._ready[tag]()

    def _arrived(self, peer: Peer, message: Any) -> None:
        self._heard[peer.role] = self._clock()
        match message:
            case Received():
                self.waits.received(message.cause, str(peer))
            case Alive():
                self.waits.progressed(str(peer), message.progress, self._clock())
            case Failed():
                raise WorkerFailed(peer, message.error)
            case Leaving():
                self.stop(StopRun(source=f"{message.reason} to {peer}", exit_code=0))
            case GroupFinished() | Prefilled():
                self.waits.touch(message.cause, self._clock())
                self._dispatch(peer, message)
            case _:
                self.waits.answered(message.cause, str(peer))
                self._dispatch(peer, message)

    def _dispatch(self, peer: Peer, message: Any) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise StateError("a message that nobody asked for", got=type(message).__name__, where=str(peer))
        handler(peer, message)

    def died(self, role: Role) -> None:
        """A child's pidfd became readable: hear its last words, then raise. Nothing, if it was replaced meanwhile."""
        if not self._supervisor.exit_text(role):
            return
        peer = self._peers.get(role) or Peer(role=role, device=Device(), incarnation=0, pid=0)
        self._gone(peer)

    def _gone(self, peer: Peer) -> NoReturn:
        """Its last message may say why; it was sent before the end of the stream but may be read after it."""
        end = self._clock() + LAST_WORDS_S
        heard = list(self._events)
        self._events.clear()
        while True:
            for event in heard:
                if isinstance(event, Arrived) and event.peer.role == peer.role:
                    self._last_word(peer, event.message)
            left = end - self._clock()
            if left <= 0:
                break
            if self._supervisor.exit_text(peer.role):
                end = min(end, self._clock() + LAST_WORDS_S / 6)
            heard = self.hub.poll(left)
        how = self._supervisor.exit_text(peer.role) or "its connection ended"
        lost = self.waits.drop_peer(str(peer))
        self._peers.pop(peer.role, None)
        self.on_gone(peer, how)
        raise WorkerDied(
            f"the {peer.role} service died",
            role=peer.role,
            got=how,
            needed=_awaited(lost),
            do=f"Its last lines are in {self._supervisor.log_text(peer.role) or 'the log of its container'}.",
            where=str(peer),
        )

    def _last_word(self, peer: Peer, message: Any) -> None:
        if isinstance(message, Failed):
            raise WorkerFailed(peer, message.error)
        if isinstance(message, Leaving):
            raise StopRun(source=f"{message.reason} to {peer}", exit_code=0)

    def _new_cause(self) -> int:
        self._next_cause += 1
        return self._next_cause - 1


def _awaited(waits: list[Wait]) -> str:
    return (
        ", ".join(wait.what for wait in waits) or "the process to stay, though nothing was asked of it at that moment"
    )
