"""Replacing a service by another program between two iterations, while the run goes on.

    asked ─► conformance test beside the run ─► border ─► Drain, Leave ─► start, join, load ─► same digest? ─► gate
                        │ a case fails                        anything of these goes wrong │
                        ▼                                                                  ▼
                   SwapRefused                                          the old program again, SwapRefused
                                          (also of one that ends before its first iteration)

A trainer reads nothing between two iterations, so it is not drained, and the gate counts no reader less. The one after
it loads over what stands; if it changes that, the old program does not go on with it, and the run ends by name.

Owns the order of these. What may be replaced, and how far it has got, is `decisions.swap`'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from rollplex.errors import (
    ConfigError,
    EngineError,
    ModelError,
    ProtocolError,
    ServiceDied,
    StateError,
    WaitError,
)
from rollplex.journal.events import ServiceReady, ServiceSwapped, SwapRefused
from rollplex.protocol.common import DigestReply, DigestRequest, Drain, Drained, Loaded, Role
from rollplex.protocol.trainer import Standing
from rollplex_coordinator.control import CoreControl
from rollplex_coordinator.decisions.swap import TAKEOVER, Surroundings, Swap, Swaps
from rollplex_coordinator.decisions.work import Work
from rollplex_coordinator.processes.link import WorkerDied, WorkerFailed
from rollplex_coordinator.processes.node import Node
from rollplex_coordinator.processes.trial import UNTESTED, Trial
from rollplex_coordinator.saying import say
from rollplex_coordinator.steps.context import Context
from rollplex_coordinator.steps.loading import load_of_trainer

TAG = "conformance test"
WENT_WRONG = (WorkerFailed, ServiceDied, WaitError, ModelError, EngineError, ProtocolError, StateError, ConfigError)
"""What a newcomer can do to whoever lets it in."""

log = logging.getLogger("rollplex.coordinator")


class Swapping:
    """The replacements of one run. All in the core's thread."""

    def __init__(self, node: Node, work: Work, control: CoreControl) -> None:
        self._node, self._work, self._control = node, work, control
        config = node.config
        self.swaps = Swaps(
            Surroundings(
                single=node.fleet.single,
                external_workers=node.external_workers,
                gpu=node.gpus is not None,
                pools=config.rollout.engine == "sglang",
                remote=not config.http.is_loopback,
            )
        )
        self._trial: Trial | None = None
        self._before: tuple[Role, tuple[str, ...], Standing | None] | None = None
        """The old program of a place whose newcomer has not begun an iteration yet, and what a trainer found there."""

    @property
    def due(self) -> bool:
        """A newcomer waits for a border."""
        return self.swaps.due is not None

    def ask(self, role: Role, command: Sequence[str]) -> Swap:
        """Begin to replace a service: its test starts now.

        Raises:
            StateError: it cannot be replaced, or not now; or its test cannot be started.
        """
        swap = self.swaps.ask(role, command, stopping=self._work.stopping is not None)
        self._before = None  # one that is to be replaced, or keeps its place, has it
        needed = "a program and arguments that a process can be started with"
        try:
            self._trial = Trial(self._node.run_dir, role, command)
        except (OSError, ValueError) as error:  # ValueError: a null character in a word
            self._refuse(UNTESTED, str(error), needed)
            raise StateError("the conformance test cannot be started", got=str(error), needed=needed) from error
        self._node.link.watch(self._trial.pidfd, TAG, self._tested)
        say(f"rollplex: {role} is to be replaced by {' '.join(command)}: testing it")
        return swap

    def at_border(self, context: Context) -> None:
        """Between two iterations: exchange what waits for it.

        Raises:
            RollplexError: neither the newcomer nor the old program could take the place.
        """
        swap = self.swaps.due
        if swap is None:
            return
        node, role, start_s = self._node, swap.role, time.monotonic()
        old = node.supervisor.command(role)
        self._control.gate = None  # nobody asks for digests meanwhile
        try:
            standing = self._dismiss(context, role)
            try:
                self._let_in(context, role, swap.command, standing)
            except WENT_WRONG as error:
                if _role_of(error) not in {None, role}:
                    raise  # somebody else's end is not the newcomer's fault
                log.warning("%s could not be replaced: %s", role, error)
                node.dismiss(role, "it could not take this place")
                self._let_in(context, role, old, standing)
                self._refuse(TAKEOVER, str(error), "a service that joins, loads and sees the same weights")
                return
        finally:
            self._control.gate = context.gate
        self.swaps.swapped(self._work.done)
        self._before = (role, tuple(old), standing)
        peer = node.link.peers[role]
        node.record.append(
            ServiceSwapped(
                role=role,
                command=swap.command,
                replaced=tuple(old),
                incarnation=peer.incarnation,
                step=self._work.done,
                version=node.record.version,
                took_s=time.monotonic() - start_s,
            )
        )
        say(f"rollplex: {role} is {' '.join(swap.command)} from iteration {self._work.done + 1} on")

    def begun(self) -> None:
        """An iteration begins: from here on the end of a newcomer is that of the run."""
        self._before = None

    def stay(self, context: Context, wait: Callable[[], None]) -> None:
        """Wait between two iterations. A newcomer that ends meanwhile, before its first one, gives its place back.

        Raises:
            RollplexError: what `wait` raises, of anybody else; or the old program could not take the place.
        """
        try:
            wait()
        except (WorkerFailed, WorkerDied) as error:
            if self._before is None or _role_of(error) is not self._before[0]:
                raise
            self._take_back(context, *self._before, str(error))

    def _take_back(self, context: Context, role: Role, old: Sequence[str], standing: Standing | None, got: str) -> None:
        log.warning("%s ended before its first iteration: %s", role, got)
        self._before = None
        self._control.gate = None
        try:
            self._node.dismiss(role, "it ended before its first iteration")
            if role is not Role.TRAINER:
                context.gate.remove_reader(role)
            self._let_in(context, role, old, standing)
        finally:
            self._control.gate = context.gate
        self._tell(self.swaps.undone(got[:4_000], "a service that stays until its first iteration"))

    def close(self) -> None:
        """The run ends."""
        if self._trial is not None:
            self._trial.close()
            self._trial = None
        if self.swaps.newest is not None and self.swaps.newest.under_way:
            self._refuse(TAKEOVER, "the end of the run", "another iteration")

    def _tested(self) -> None:
        trial = self._trial
        assert trial is not None, "its descriptor is watched"
        self._node.link.unwatch(trial.pidfd, TAG)
        failure = trial.failure()
        trial.close()
        self._trial = None
        if failure is None:
            self.swaps.passed()
        else:
            self._refuse(*failure)

    def _refuse(self, case: str, got: str, needed: str) -> None:
        self._tell(self.swaps.refused(case, got[:4_000], needed[:4_000]))

    def _tell(self, swap: Swap) -> None:
        """Of one that is refused."""
        role, case, got, needed = swap.role, swap.case, swap.got, swap.needed
        self._node.record.append(SwapRefused(role=role, command=swap.command, case=case, got=got, needed=needed))
        say(f"rollplex: {role} stays: {case} of {' '.join(swap.command)}: got {got}; needed {needed}")

    def _dismiss(self, context: Context, role: Role) -> Standing | None:
        """The one that has the place finishes, reads no more, and leaves. Returns what stands, if it was a trainer."""
        node, link, version = self._node, self._node.link, self._node.record.version

        def quiet() -> bool:
            """Nothing is awaited from it, and no digests from anybody: theirs would be taken for the newcomer's."""
            return not self._control.digesting and all(wait.peer != str(link.peer(role)) for wait in link.waits.open)

        link.pump(quiet)
        leaving, unit_s = "another program takes this place", node.config.deadlines.unit_s
        if role is Role.TRAINER:
            seen = link.call(
                Role.PREFIX, lambda cause: DigestRequest(cause=cause), "digest what stands", unit_s, DigestReply
            )
            node.dismiss(role, leaving)
            return Standing(version=seen.version, digest=seen.digest)
        drain = "drain before it is replaced"
        link.call(role, lambda cause: Drain(cause=cause, version=version), drain, unit_s, Drained)
        node.dismiss(role, leaving)
        context.gate.remove_reader(role)
        return None

    def _let_in(self, context: Context, role: Role, command: Sequence[str], standing: Standing | None) -> None:
        """standing: what a trainer is to find. Raises WENT_WRONG: it has not got the place, whatever of it runs."""
        node, link, deadlines = self._node, self._node.link, self._node.config.deadlines
        node.supervisor.use(role, command)
        node.start(role)
        link.await_peers([role], deadlines.start_s)
        team, make = node.loads[role] if standing is None else load_of_trainer(context, standing)
        loaded = link.call_team(team, make, "load the model", deadlines.load_s, Loaded)
        if loaded.table_bytes != context.sizes.table.total_bytes:
            raise ModelError(
                f"the {role} service has another parameter table",
                got=f"{loaded.table_bytes} bytes",
                needed=f"{context.sizes.table.total_bytes}",
            )
        other = Role.PREFIX if role is Role.TRAINER else Role.TRAINER
        seen = link.call_many(
            {who: lambda cause: DigestRequest(cause=cause) for who in (role, other)},
            "digest the weights",
            deadlines.unit_s,
            DigestReply,
        )
        right = standing or seen[other]
        for who, reply in seen.items():
            if (reply.version, reply.digest) != (right.version, right.digest):
                raise StateError(
                    f"with this {role} service the {who} sees other weights",
                    got=f"version {reply.version}, {reply.digest}",
                    needed=f"version {right.version}, {right.digest}",
                )
        if role is not Role.TRAINER:
            replayed = role is Role.ROLLOUT and node.config.rollout.engine == "replay"
            context.gate.register_reader(role, on_policy=loaded.on_policy, replayed=replayed)
        peer = link.peers[role]
        node.record.append(ServiceReady(service=str(peer), role=role, incarnation=peer.incarnation))


def _role_of(error: Exception) -> Role | None:
    """Whose end an error tells; None: it does not say."""
    if isinstance(error, WorkerFailed):
        return error.peer.role
    return error.role if isinstance(error, WorkerDied) else None
