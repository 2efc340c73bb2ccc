"""A worker ended in the middle of the work: all workers start again, over the same weights, and the work is done again.

    work ─► end of a worker ─► worth it? ─► told ─► all workers end, leases come back ─► start, join, load ─► work again
                                  │ no                                        │ an end again: the same question
                                  ▼                                           ▼
                           the run ends by it                     no: the run ends by the first one

What is left: the standing segments (weights, reference, arenas, optimizer state), whose descriptors the holder keeps,
and the inputs of steps; input and reward child. What was asked of the reward child is asked again. An iteration begins
again from its first token; one whose update was committed is only finished.

Owns the order of these. Whether and how often is `decisions.restarts`', what of a step is settled `decisions.gate`'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from rollplex.errors import JournalError, RollplexError, ServiceDied, WaitError
from rollplex.journal.events import ErrorRaised, WorkersRestarted, WorkersRestarting
from rollplex.journal.phases import Phase
from rollplex.protocol.common import Role
from rollplex_coordinator.control import CoreControl
from rollplex_coordinator.decisions.digests import combined
from rollplex_coordinator.decisions.fleet import WORKERS
from rollplex_coordinator.decisions.restarts import End, Restart, Restarts
from rollplex_coordinator.processes.link import WorkerDied, WorkerFailed
from rollplex_coordinator.processes.mps import MpsError
from rollplex_coordinator.processes.node import Node
from rollplex_coordinator.processes.supervisor import NotEndedError
from rollplex_coordinator.ready import register_readers
from rollplex_coordinator.saying import say
from rollplex_coordinator.steps.context import Context
from rollplex_coordinator.steps.loading import load_again
from rollplex_coordinator.telling import told

ResultT = TypeVar("ResultT")

log = logging.getLogger("rollplex.coordinator")


class Restarting:
    """The restarts of one run. All in the core's thread."""

    def __init__(self, node: Node, control: CoreControl) -> None:
        self._node, self._control = node, control
        self.restarts = Restarts(0 if node.external_workers else node.config.run.restarts)
        self._first: tuple[RollplexError, ErrorRaised, str] | None = None
        """What began the present row of restarts, and how it was told; the work has not got on since."""
        self._lines: list[str] = []
        """What has gone wrong in this row since."""

    def attempt(self, context: Context, what: Callable[[], ResultT]) -> ResultT:
        """Do a piece of work, again as long as workers end in it and may start again.

        Args:
            what: can be called again when it has raised.

        Raises:
            RollplexError: what `what` raises, if no restart follows.
        """
        while True:
            try:
                done = what()
            except RollplexError as error:
                self._go_on_after(context, error)
            else:
                self.restarts.progressed()
                self._first, self._lines = None, []
                return done

    def told(self, error: RollplexError, *, logs_stay: bool = True) -> tuple[ErrorRaised, str]:
        """The end of the run by an error, as `telling.told`: where restarts came between, as it was before them."""
        node = self._node
        if self._first is not None and self._first[0] is error:
            _, event, text = self._first
            return event, "".join([text, *(f"\n  {line}" for line in self._lines)])
        return told(error, node.record, node.supervisor, node.gpus, logs_stay=logs_stay)

    def _go_on_after(self, context: Context, error: RollplexError) -> None:
        """Workers that can do the work again. Raises `error`, or the first one of the row."""
        if self._not_worth(context, error):
            raise error
        self._first = self._first or (error, *self.told(error))
        first, restarts = self._first[0], self.restarts
        while restarts.left:
            try:
                self._start_again(context, error)
            except JournalError:
                raise
            except RollplexError as again:
                self._lines.append(f"restart {restarts.made} of {restarts.allowed} failed: {again}")
                log.warning("%s", self._lines[-1])
                if reason := self._not_worth(context, again):
                    self._lines.append(f"the workers do not start again: {reason}")
                    raise first from again
                error = again
            else:
                return
        self._lines.append(f"run.restarts is {restarts.allowed}, and so many were made")
        raise first

    def _not_worth(self, context: Context, error: RollplexError) -> str:
        """Why no restart follows, whatever is left of them; empty: one may."""
        if isinstance(error, NotEndedError):
            return "the ones before them are still there"
        end = end_of(error)
        if end is None:
            return f"{type(error).__name__} is not the end of a worker"
        if not all(context.digests.values()):
            return "the trainer has not told the digest of the weights"
        return self.restarts.not_worth(end, whole=context.gate.settled)

    def _start_again(self, context: Context, error: RollplexError) -> None:
        """Raises RollplexError: of the new workers, or of what they need."""
        node, begin_s = self._node, time.monotonic()
        pause_s = self.restarts.begin()
        self._announce(error)
        self._control.gate = None  # nobody asks for digests meanwhile
        node.end_workers()
        self._take_back(context)
        self._pause(pause_s)
        for role in WORKERS:  # before LOAD: what is journalled of how long a start takes is that of the run's
            node.start(role)
        node.record.enter(Phase.LOAD)
        context.memory.enter(Phase.LOAD)
        node.link.await_peers(WORKERS, node.config.deadlines.start_s)
        register_readers(context.gate, load_again(node, context), node.config)
        if node.observers is not None:
            node.observers.loaded()
        node.record.enter(Phase.IDLE)
        context.memory.enter(Phase.IDLE)
        self._control.gate = context.gate
        self._back(context, time.monotonic() - begin_s)

    def _pause(self, pause_s: float) -> None:
        """Whatever else is asked of the run is answered meanwhile."""
        end_s = time.monotonic() + pause_s
        self._node.link.pump(lambda: time.monotonic() >= end_s)

    def _take_back(self, context: Context) -> None:
        """What the dead held, and the step that they were at."""
        context.notice.say(beside=False)
        context.gate.lost()
        context.record.version = context.gate.version
        context.record.open_groups = ()
        context.memory.lose(WORKERS)
        self._control.lost()

    def _announce(self, error: RollplexError) -> None:
        node, restarts = self._node, self.restarts
        event, _ = told(error, node.record, node.supervisor, node.gpus)
        end = end_of(error)
        assert end is not None, "it was asked before"
        where = f"phase {event.phase}" + ("" if event.step is None else f", step {event.step}")
        how = f"{event.error.what}" + (f": {event.error.got}" if event.error.got else "")
        node.record.append(
            WorkersRestarting(
                number=restarts.made,
                allowed=restarts.allowed,
                service=event.service,
                role=end.role,
                error=event.error,
                phase=event.phase,
                version=node.record.version,
                step=event.step,
                log_path=event.log_path,
            )
        )
        restarts.newest = Restart(
            number=restarts.made,
            service=event.service,
            how=how,
            phase=event.phase,
            step=event.step,
            wall_s=time.time(),
        )
        say(f"rollplex: {how}, in {where}. All workers start again (restart {restarts.made} of {restarts.allowed})")

    def _back(self, context: Context, took_s: float) -> None:
        record = self._node.record
        record.append(
            WorkersRestarted(
                number=self.restarts.made,
                version=record.version,
                digest=combined(context.digests),
                took_s=took_s,
                step=record.step,
            )
        )
        self.restarts.done()
        say(f"rollplex: all workers are back after {took_s:.1f} s, at version {record.version} of the weights")


def end_of(error: RollplexError) -> End | None:
    """Whose end an error tells; None: it is that of no process."""
    match error:
        case WorkerFailed():
            return End(role=error.peer.role, kind=error.report.kind, text=str(error))
        case WorkerDied():
            return End(role=error.role, kind=ServiceDied.__name__, text=str(error))
        case WaitError() if (name := error.where.partition("[")[0]) in set(Role):
            return End(role=Role(name), kind=WaitError.__name__, text=str(error))
        case MpsError():
            return End(role=None, kind=MpsError.__name__, text=str(error))
        case _:
            return None
