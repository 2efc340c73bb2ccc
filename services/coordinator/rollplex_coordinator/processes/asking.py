"""Instructions to workers with cause ids, and their typed answers: every one with a deadline, of a team as one.

Owns what each process was told and who handles which answer. Does not know who joins and who ends, nor when messages
are read: that is `link`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

from rollplex.errors import ProtocolError, StateError
from rollplex.protocol.common import Device, Role
from rollplex_coordinator.decisions.fleet import Fleet, Team
from rollplex_coordinator.decisions.waits import Waits
from rollplex_coordinator.processes.hub import Hub, Peer, Unreachable
from rollplex_coordinator.processes.merging import OF_A_DEVICE, STREAMED, Instruction

AnswerT = TypeVar("AnswerT")


class Asking(ABC):
    """What can be asked of workers.

    Args:
        ack_s: deadline for a worker's message thread to acknowledge an instruction.
        clock: CLOCK_MONOTONIC, seconds.
    """

    def __init__(self, hub: Hub, fleet: Fleet, ack_s: float, clock: Callable[[], float]) -> None:
        self.hub = hub
        self.fleet = fleet
        self.waits = Waits()
        self._ack_s = ack_s
        self._clock = clock
        self._peers: dict[tuple[Role, Device], Peer] = {}
        self._next_cause = 1
        self._told: dict[int, tuple[Instruction, int]] = {}
        self._handlers: dict[type, Callable[[Peer, Any], None]] = {}
        self._unwanted: set[int] = set()

    @abstractmethod
    def pump(self, until: Callable[[], bool]) -> None:
        """Handle events until `until()` holds."""

    @abstractmethod
    def _gone(self, peer: Peer) -> NoReturn:
        """A worker has ended: raise how."""
        raise NotImplementedError

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

        wanted = [
            (team.role, device)
            for team, _ in instructions
            for device in (team.devices if answer in OF_A_DEVICE else (team.leader,))
        ]
        self.on(answer, keep)
        try:
            for team, make in instructions:
                self.ask_team(team, make, what, section_s, heard)
            self.pump(lambda: len(answers) == len(wanted))
        finally:
            if before is not None:
                self._handlers[answer] = before
        return [answers[place] for place in wanted]

    def disregard(self, roles: Collection[Role]) -> None:
        """What these roles were asked is not wanted any more: answers to it are dropped, if they come at all."""
        for cause, (told, _) in list(self._told.items()):
            if told.team.role in roles:
                self.waits.drop(cause)
                del self._told[cause]
                self._unwanted.add(cause)

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

    def _heard_answer(self, peer: Peer, message: Any) -> None:
        """An answer, or a piece of one.

        Raises:
            StateError: nobody waits for it, nobody handles it, or the processes of a team disagree.
        """
        if message.cause in self._unwanted:
            if not isinstance(message, STREAMED):
                self._unwanted.discard(message.cause)
            return
        if isinstance(message, STREAMED):
            self.waits.touch(message.cause, self._clock())
            told, rank = self._told_of(peer, message)
            complete = told.piece(rank, message)
        else:
            self.waits.answered(message.cause, str(peer))
            told, rank = self._told_of(peer, message)
            del self._told[message.cause]
            complete = told.answered(rank, message)
        self._dispatch_all(told, peer, complete)

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

    def _new_cause(self) -> int:
        self._next_cause += 1
        return self._next_cause - 1
