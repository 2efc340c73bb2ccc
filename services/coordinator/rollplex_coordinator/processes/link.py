"""The coordinator's line to its workers: who has joined, who is awaited, who has ended, and the loop that hears them.

Owns the one place where the event loop turns (`pump`). What workers are told is `asking`'s; what an answer means is the
business of whoever registered for its type with `on`.

    pump(until) waits for: messages, deaths, signals, control requests.   unblocked by: `until()`, or an error.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from rollplex.errors import ProtocolError, WaitError
from rollplex.protocol.common import Alive, Device, ErrorReport, Failed, Leave, Leaving, Received, Role
from rollplex_coordinator.decisions.fleet import DEVICE, SINGLE, WORKERS, Fleet, Team
from rollplex_coordinator.decisions.waits import Wait
from rollplex_coordinator.processes.asking import Asking
from rollplex_coordinator.processes.ends import WorkerDied, WorkerFailed
from rollplex_coordinator.processes.hub import Arrived, Event, Gone, Hub, Joined, Peer, Ready
from rollplex_coordinator.processes.stop import StopRun
from rollplex_coordinator.processes.supervisor import ABORTED, KILLED, Supervisor

IDLE_TICK_S = 0.5
LAST_WORDS_S = 0.3
ENDING_TICK_S = 0.02
SILENT_S = 4.0
"""A worker gives a sign of life each second."""
PATIENCE_S = 3.0
"""How long an update from BEGIN to COMMIT, or a checkpoint, holds back a stop."""

log = logging.getLogger("rollplex.coordinator")

__all__ = ("PATIENCE_S", "Link", "WorkerDied", "WorkerFailed")


class Link(Asking):
    """Who is there, and the loop in which they are heard.

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
        super().__init__(hub, fleet, ack_s, clock)
        self._supervisor = supervisor
        self._heard: dict[tuple[Role, Device], float] = {}
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
        """When a worker's last message arrived, by this link's clock; None before it joined."""
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
            kept = [event for event in events if not isinstance(event, Ready)]  # what is ready will be so again
            self._events.extend(kept)
            if len(kept) < len(events):
                time.sleep(ENDING_TICK_S)
        self.hub.disconnect(peer)

    def forget_workers(self) -> None:
        """All workers are about to be replaced: nothing of those that there were is heard or awaited any more. What the
        reward child was asked for them is not wanted; what the input child was, still is."""
        for team in self.fleet.workers:
            for device in team.devices:
                self.waits.drop_peer(_text(team.role, device))
                self._peers.pop((team.role, device), None)
                self._heard.pop((team.role, device), None)
        self.disregard((*WORKERS, Role.REWARD))
        self.hub.fence(WORKERS)
        # What is ready will be so again, unless it was a worker's end.
        kept = [event for event in self._events if not isinstance(event, Ready) and event.peer.role not in WORKERS]
        self._events = deque(kept)
        self._atomic = False

    def await_ends(self, deadline_s: float, children_run: Callable[[], bool]) -> list[Peer]:
        """After `leave_all`: wait until all streams have ended and no child runs; returns who is still there.

        Descriptors are served meanwhile: a worker that waits for one could not leave. Nothing else is handled any more.
        Whoever is told to leave must not see the end of this coordinator first.
        """
        self.hub.unwatch_all()
        end = self._clock() + deadline_s
        events: list[Event] = list(self._events)  # an end that was heard while another one was told is among them
        while True:
            for event in events:
                if isinstance(event, Gone):
                    self._peers.pop((event.peer.role, event.peer.device), None)
            left = end - self._clock()
            if left <= 0 or not (self._peers or children_run()):
                break
            events = self.hub.poll(min(left, ENDING_TICK_S))
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
                self._heard[peer.role, peer.device] = self._clock()  # its greeting; also of one that takes a place
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
            case _:
                self._heard_answer(peer, message)

    def died(self, role: Role, device: Device = DEVICE) -> None:
        """A child's pidfd became readable: hear its last words, then raise. Nothing, if it was replaced meanwhile."""
        if not self._supervisor.exit_text(role, device):
            return
        peer = self._peers.get((role, device)) or Peer(role=role, device=device, incarnation=0, pid=0)
        self._gone(peer)

    def _gone(self, peer: Peer) -> NoReturn:
        """Its last message may say why; it was sent before the end of the stream but may be read after it. What others
        said meanwhile stays for the next turn, if there is one."""
        end = self._clock() + LAST_WORDS_S
        heard = list(self._events)
        self._events.clear()
        while True:
            told = [event for event in heard if not isinstance(event, Ready)]  # what is ready will be so again
            own = [event for event in told if (event.peer.role, event.peer.device) == (peer.role, peer.device)]
            self._events.extend(event for event in told if event not in own)
            for event in own:
                if isinstance(event, Arrived):
                    self._last_word(peer, event.message)
            left = end - self._clock()
            if left <= 0:
                break
            if self._supervisor.exit_text(peer.role, peer.device):
                end = min(end, self._clock() + LAST_WORDS_S / 6)
            heard = self.hub.poll(left)
        self._bury(peer)

    def _failed(self, peer: Peer, report: ErrorReport) -> NoReturn:
        """A process reports an error. That another one was killed, or failed, in the middle of what they did together,
        is the reason then, and it is told instead."""
        others = [device for device in self.fleet.devices_of(peer.role) if device != peer.device]
        end = self._clock() + LAST_WORDS_S
        while others:
            for device in others:
                how = self._supervisor.exit_text(peer.role, device)
                # Who ends itself so (torch does, when another rank is lost to it) is not why another could not work.
                if how.startswith(KILLED) and (report.kind == WaitError.__name__ or ABORTED not in how):
                    dead = Peer(role=peer.role, device=device, incarnation=0, pid=0)
                    self._bury(self._peers.get((peer.role, device), dead))
            if report.kind == WaitError.__name__:
                self._raise_what_was_waited_for(peer.role)
            if self._clock() >= end:
                break
            self._events.extend(self.hub.poll(ENDING_TICK_S))
        raise WorkerFailed(peer, report)

    def _raise_what_was_waited_for(self, role: Role) -> None:
        """The error of a process of this role that did not just wait in vain for another, if one has come."""
        said = [event for event in self._events if isinstance(event, Arrived) and event.peer.role is role]
        for event in said:
            if isinstance(event.message, Failed) and event.message.error.kind != WaitError.__name__:
                raise WorkerFailed(event.peer, event.message.error)

    def _bury(self, peer: Peer) -> NoReturn:
        how = self._supervisor.exit_text(peer.role, peer.device) or "its connection ended"
        lost = self.waits.drop_peer(str(peer))
        self._peers.pop((peer.role, peer.device), None)
        self._dismissed.add(peer)  # its stream may end later than its process: that is not another death
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


def _text(role: Role, device: Device) -> str:
    return f"{role}[{device}]"


def _awaited(waits: list[Wait]) -> str:
    return (
        ", ".join(wait.what for wait in waits) or "the process to stay, though nothing was asked of it at that moment"
    )
