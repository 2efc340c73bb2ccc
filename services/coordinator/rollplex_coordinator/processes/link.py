"""The coordinator's line to its workers: instructions with cause ids out, typed answers in, every wait with a deadline.

Owns who has joined, what is awaited, and the one place where the event loop turns (`pump`). What an answer means is
the business of whoever registered for its type with `on`. Processes that work together (`decisions.fleet`) are told
together, and their answer is one (`merging`).

    pump(until) waits for: messages, deaths, signals, control requests.   unblocked by: `until()`, or an error.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

from rollplex.errors import ProtocolError, RollplexError, ServiceDied, StateError
from rollplex.protocol.common import Alive, Device, ErrorReport, Failed, Leave, Leaving, Received, Role
from rollplex_coordinator.decisions.fleet import DEVICE, SINGLE, Fleet, Team
from rollplex_coordinator.decisions.waits import Wait, Waits
from rollplex_coordinator.processes.hub import Arrived, Event, Gone, Hub, Joined, Peer, Ready, Unreachable
from rollplex_coordinator.processes.merging import OF_A_DEVICE, STREAMED, Instruction
from rollplex_coordinator.processes.stop import StopRun
from rollplex_coordinator.processes.supervisor import KILLED, Supervisor

IDLE_TICK_S = 0.5
LAST_WORDS_S = 0.3
ENDING_TICK_S = 0.02
SILENT_S = 4.0
"""A worker gives a sign of life each second."""
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

    def __init__(
        self, what: str, *, role: Role, got: str, needed: str, do: str, where: str, device: Device = DEVICE
    ) -> None:
        super().__init__(what, got=got, needed=needed, do=do, where=where)
        self.role = role
        self.device = device


class Link:
    """Instructions and answers.

    Args:
        hub: the sockets.
        supervisor: for how a dead child ended and where its log is.
        ack_s: deadline for a worker's message thread to acknowledge an instruction.
        clock: CLOCK_MONOTONIC, seconds.
        fleet: which processes there are, and which of them work together.
    """

    def __init__(
        self,
        hub: Hub,
        supervisor: Supervisor,
        ack_s: float,
        clock: Callable[[], float] = time.monotonic,
        fleet: Fleet = SINGLE,
    ) -> None:
        self.hub = hub
        self.fleet = fleet
        self.waits = Waits()
        self._supervisor = supervisor
        self._ack_s = ack_s
        self._clock = clock
        self._peers: dict[tuple[Role, Device], Peer] = {}
        self._heard: dict[tuple[Role, Device], float] = {}
        self._next_cause = 1
        self._told: dict[int, tuple[Instruction, int]] = {}
        self._handlers: dict[type, Callable[[Peer, Any], None]] = {}
        self._ready: dict[str, Callable[[], None]] = {}
        self._events: deque[Event] = deque()
        self._dismissed: set[Peer] = set()
        self._stop: StopRun | None = None
        self._stop_asked_s = 0.0
        self._atomic = False
        self.after_turn: Callable[[], None] = lambda: None
        self.on_joined: Callable[[Peer], None] = lambda _: None
        self.on_gone: Callable[[Peer, str], None] = lambda _peer, _how: None

    # --- who is there ---------------------------------------------------------------------------------------------

    @property
    def peers(self) -> dict[Role, Peer]:
        """Workers that can be instructed, of each role that on its first device."""
        return {role: self._peers[role, device] for role, device in sorted(self._peers, reverse=True)}

    def peer(self, role: Role, device: Device = DEVICE) -> Peer | None:
        """The worker of a role on a device; None if it cannot be instructed."""
        return self._peers.get((role, device))

    def team_of(self, peer: Peer) -> Team:
        """The processes that a worker is always told together with, itself included."""
        return self.fleet.team_of(peer.role, peer.device)

    def watch(self, fd: int, tag: str, handler: Callable[[], None]) -> None:
        """Call `handler` whenever `fd` is readable."""
        self._ready[tag] = handler
        self.hub.watch(fd, tag)

    def unwatch(self, fd: int, tag: str) -> None:
        """Undo `watch`."""
        self._ready.pop(tag, None)
        self.hub.unwatch(fd)

    def heard_s(self, role: Role, device: Device = DEVICE) -> float | None:
        """When a worker's last message arrived, by this link's clock; None before the first."""
        return self._heard.get((role, device))

    def await_peers(self, roles: Iterable[Role], deadline_s: float) -> None:
        """Pump until every process of every role has joined.

        Raises:
            WaitError: names the first that has not come in time.
        """
        now = self._clock()
        waits: dict[tuple[Role, Device], int] = {}
        for place in [(role, device) for role in roles for device in self.fleet.devices_of(role)]:
            if place not in self._peers:
                waits[place] = self._new_cause()
                self.waits.add(
                    cause=waits[place],
                    what="join the run",
                    peer=_text(*place),
                    now_s=now,
                    ack_s=None,
                    section_s=deadline_s,
                )

        def all_there() -> bool:
            for place in [place for place in waits if place in self._peers]:
                self.waits.answered(waits.pop(place), _text(*place))
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

    def dismiss(self, role: Role, device: Device, reason: str, deadline_s: float) -> None:
        """Have one worker leave, for another program to take its place; nothing of it is heard any more. Whatever else
        happens meanwhile is handled at the next turn."""
        self.waits.drop_peer(_text(role, device))
        peer = self._peers.pop((role, device), None)
        if peer is None:
            return
        self._dismissed.add(peer)
        end, there = self._clock() + deadline_s, True
        try:
            self.hub.send(peer, Leave(reason=reason))
        except ProtocolError as error:
            log.debug("%s is gone already: %s", peer, error)
        while there and (left := end - self._clock()) > 0:
            events = self.hub.poll(min(left, ENDING_TICK_S))
            there = Gone(peer=peer) not in events and not self._supervisor.exit_text(role, device)
            self._events.extend(events)
        self.hub.disconnect(peer)

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
                    self._peers.pop((event.peer.role, event.peer.device), None)
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
        """Tell the one process of a role what `make(cause)` builds; its answer goes to the handler of its type.

        Raises:
            ProtocolError: the worker has not joined, or does not read; or the role has several processes.
            WorkerFailed, ServiceDied: it has ended, which the end of its stream will say only later.
        """
        return self.ask_team(self._one(role, what), lambda cause, _: make(cause), what, section_s)

    def ask_team(
        self,
        team: Team,
        make: Callable[[int, int], Any],
        what: str,
        section_s: float,
        heard: Callable[[Peer], None] = lambda _: None,
    ) -> int:
        """Tell each rank of a team what `make(cause, rank)` builds. Their answer goes to the handler of its type, once:
        when all have answered, with the leader as its sender and under the leader's cause, which is returned. Answers
        about a device (`merging.OF_A_DEVICE`) go there one by one.

        Args:
            heard: told of each process's answer when it comes.

        Raises:
            ProtocolError: a worker has not joined, or does not read.
            WorkerFailed, ServiceDied: one has ended, which the end of its stream will say only later.
        """
        peers = [self._joined_peer(team.role, device, what) for device in team.devices]
        told = Instruction(team, lambda rank: heard(peers[rank]))
        causes = [self._tell(peer, make, rank, (what, section_s), told) for rank, peer in enumerate(peers)]
        return causes[0]

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
        told = [(self._one(role, what), lambda cause, _, make=make: make(cause)) for role, make in instructions.items()]
        return dict(zip(instructions, self.call_teams(told, what, section_s, answer, heard), strict=True))

    def call_team(
        self, team: Team, make: Callable[[int, int], Any], what: str, section_s: float, answer: type[AnswerT]
    ) -> AnswerT:
        """`ask_team`, and pump until its answer is there."""
        (found,) = self.call_teams([(team, make)], what, section_s, answer)
        return found

    def call_teams(
        self,
        instructions: Sequence[tuple[Team, Callable[[int, int], Any]]],
        what: str,
        section_s: float,
        answer: type[AnswerT],
        heard: Callable[[Peer], None] = lambda _: None,
    ) -> list[AnswerT]:
        """`call_team` to several teams at once: their answers in order. Of answers about a device there is one for each
        rank of each team. `heard` is told of each process's answer when it comes."""
        answers: dict[tuple[Role, Device], AnswerT] = {}
        before = self._handlers.get(answer)

        def keep(peer: Peer, message: AnswerT) -> None:
            answers[peer.role, peer.device] = message

        self.on(answer, keep)
        for team, make in instructions:
            self.ask_team(team, make, what, section_s, heard)
        teams = [team for team, _ in instructions]
        wanted = [
            (team.role, device)
            for team in teams
            for device in (team.devices if answer in OF_A_DEVICE else (team.leader,))
        ]
        try:
            self.pump(lambda: len(answers) == len(wanted))
        finally:
            if before is not None:
                self._handlers[answer] = before
        return [answers[place] for place in wanted]

    def _one(self, role: Role, what: str) -> Team:
        """The team of a role that has one process."""
        first, *others = self.fleet.teams_of(role)
        if others or len(first.devices) > 1:
            raise ProtocolError(
                "cannot instruct a role of several processes as one", got=what, needed="a team of it", where=str(role)
            )
        return first

    def _joined_peer(self, role: Role, device: Device, what: str) -> Peer:
        peer = self._peers.get((role, device))
        if peer is None:
            raise ProtocolError(
                "cannot instruct a worker that has not joined", got=what, where=self.fleet.name(role, device)
            )
        return peer

    def _tell(
        self,
        peer: Peer,
        make: Callable[[int, int], Any],
        rank: int,
        wait: tuple[str, float],
        told: Instruction,
    ) -> int:
        """One process's part of an instruction. wait: what is awaited, and within how many seconds."""
        cause = self._new_cause()
        try:
            self.hub.send(peer, make(cause, rank))
            reached = True
        except Unreachable:
            reached = False
        what, section_s = wait
        self.waits.add(
            cause=cause, what=what, peer=str(peer), now_s=self._clock(), ack_s=self._ack_s, section_s=section_s
        )
        self._told[cause] = (told, rank)
        if not reached:
            self._gone(peer)
        return cause

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
            self.waits.check(self._clock(), self._silent())
            self.after_turn()
            self._obey_stop()

    def _silent(self) -> list[str]:
        """Of several processes of a role those that say nothing any more: whoever works with them waits for them."""
        if self.fleet.single:
            return []
        early = self._clock() - SILENT_S
        return [str(peer) for place, peer in self._peers.items() if self._heard.get(place, early) < early]

    def _handle(self, event: Event) -> None:
        if isinstance(event, Arrived | Gone):
            if event.peer in self._dismissed:
                return
            place = (event.peer.role, event.peer.device)
            if self._peers.get(place, event.peer) != event.peer:
                return  # of a process that has been replaced
        match event:
            case Joined(peer=peer):
                self._peers[peer.role, peer.device] = peer
                self.on_joined(peer)
            case Arrived(peer=peer, message=message):
                self._arrived(peer, message)
            case Gone(peer=peer):
                self._gone(peer)
            case Ready(tag=tag):
                self._ready[tag]()

    def _arrived(self, peer: Peer, message: Any) -> None:
        self._heard[peer.role, peer.device] = self._clock()
        match message:
            case Received():
                self.waits.received(message.cause, str(peer))
            case Alive():
                self.waits.progressed(str(peer), message.progress, self._clock())
            case Failed():
                self._failed(peer, message.error)
            case Leaving():
                self.stop(StopRun(source=f"{message.reason} to {peer}", exit_code=0))
            case _ if isinstance(message, STREAMED):
                self.waits.touch(message.cause, self._clock())
                told, rank = self._told_of(peer, message)
                self._dispatch_all(told, peer, told.piece(rank, message))
            case _:
                self.waits.answered(message.cause, str(peer))
                told, rank = self._told.pop(message.cause)
                self._dispatch_all(told, peer, told.answered(rank, message))

    def _told_of(self, peer: Peer, message: Any) -> tuple[Instruction, int]:
        """The instruction that a piece belongs to."""
        told, rank = self._told.get(message.cause, (None, 0))
        if told is None or (told.team.role, told.team.devices[rank]) != (peer.role, peer.device):
            raise StateError(
                "a piece of an answer that nobody waits for",
                got=f"{type(message).__name__} to {message.cause} from {peer}",
                needed="one before the answer itself, from whoever was asked",
            )
        return told, rank

    def _dispatch_all(self, told: Instruction, peer: Peer, messages: Iterable[Any]) -> None:
        leader = self._peers.get((told.team.role, told.team.leader), peer)
        for message in messages:
            self._dispatch(peer if isinstance(message, OF_A_DEVICE) else leader, message)

    def _dispatch(self, peer: Peer, message: Any) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise StateError("a message that nobody asked for", got=type(message).__name__, where=str(peer))
        handler(peer, message)

    def died(self, role: Role, device: Device = DEVICE) -> None:
        """A child's pidfd became readable: hear its last words, then raise. Nothing, if it was replaced meanwhile."""
        if not self._supervisor.exit_text(role, device):
            return
        peer = self._peers.get((role, device)) or Peer(role=role, device=device, incarnation=0, pid=0)
        self._gone(peer)

    def _gone(self, peer: Peer) -> NoReturn:
        """Its last message may say why; it was sent before the end of the stream but may be read after it."""
        end = self._clock() + LAST_WORDS_S
        heard = list(self._events)
        self._events.clear()
        while True:
            for event in heard:
                if isinstance(event, Arrived) and (event.peer.role, event.peer.device) == (peer.role, peer.device):
                    self._last_word(peer, event.message)
            left = end - self._clock()
            if left <= 0:
                break
            if self._supervisor.exit_text(peer.role, peer.device):
                end = min(end, self._clock() + LAST_WORDS_S / 6)
            heard = self.hub.poll(left)
        self._bury(peer)

    def _failed(self, peer: Peer, report: ErrorReport) -> NoReturn:
        """A process reports an error. That another one was killed, in the middle of what they did together, is the
        reason then, and it is told instead."""
        others = [device for device in self.fleet.devices_of(peer.role) if device != peer.device]
        end = self._clock() + LAST_WORDS_S
        while others:
            for device in others:
                if self._supervisor.exit_text(peer.role, device).startswith(KILLED):
                    dead = Peer(role=peer.role, device=device, incarnation=0, pid=0)
                    self._bury(self._peers.get((peer.role, device), dead))
            if self._clock() >= end:
                break
            self._events.extend(self.hub.poll(ENDING_TICK_S))
        raise WorkerFailed(peer, report)

    def _bury(self, peer: Peer) -> NoReturn:
        how = self._supervisor.exit_text(peer.role, peer.device) or "its connection ended"
        lost = self.waits.drop_peer(str(peer))
        self._peers.pop((peer.role, peer.device), None)
        self.on_gone(peer, how)
        place = f" of device {peer.device}" if self.fleet.several(peer.role) else ""
        log_text = self._supervisor.log_text(peer.role, peer.device)
        raise WorkerDied(
            f"the {peer.role} service{place} died",
            role=peer.role,
            device=peer.device,
            got=how,
            needed=_awaited(lost),
            do=f"Its last lines are in {log_text or 'the log of its container'}.",
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


def _text(role: Role, device: Device) -> str:
    return f"{role}[{device}]"


def _awaited(waits: list[Wait]) -> str:
    return (
        ", ".join(wait.what for wait in waits) or "the process to stay, though nothing was asked of it at that moment"
    )
