"""Carries out the gate's instructions: journal, messages to trainers and readers, and back.

    PrepareUpdate ─► all votes ─► Drain ─► all drained ─► BEGIN ─► ApplyUpdate ─► all applied
      ─► with several devices: Publish ─► all published ─► COMMIT ─► Committed ─► all told

Owns the hand-over and what the trainers said about the step; the gate decides every step of it, and knows one trainer
and two readers: a role has spoken when all its teams have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, assert_never

from rollplex.errors import RewardError, UpdateError
from rollplex.journal import events
from rollplex.journal.phases import Phase
from rollplex.layout.parameters import GRADIENTS
from rollplex.protocol.common import CachesDropped, Committed, Device, Drain, Drained, Role
from rollplex.protocol.trainer import (
    ApplyUpdate,
    GradientsKept,
    KeepGradients,
    PrepareUpdate,
    Publish,
    Published,
    SkipUpdate,
    UpdateApplied,
    UpdateSkipped,
    UpdateVote,
)
from rollplex_coordinator.decisions.busy import Span
from rollplex_coordinator.decisions.digests import check_replicas, combined
from rollplex_coordinator.decisions.fleet import Team
from rollplex_coordinator.decisions.gate_steps import (
    Apply,
    DrainReader,
    GateStep,
    JournalBegin,
    JournalCommit,
    Opened,
    Prepare,
    Skip,
    TellReader,
)
from rollplex_coordinator.decisions.votes import same_vote
from rollplex_coordinator.processes.hub import Peer
from rollplex_coordinator.steps.context import Context

NO_REWARDS = "every group of the step was left out"


class Update:
    """One passage through the gate."""

    def __init__(self, context: Context) -> None:
        self._c = context
        self._opened: Opened | None = None
        self._votes: dict[Team, UpdateVote] = {}
        self._applied: dict[Team, UpdateApplied] = {}
        self._published: dict[Device, Published] = {}
        self._silent: dict[Role, int] = {}
        """Teams that have not answered the present question to their role."""
        self.metrics: dict[str, float] = {}
        self.spans: list[Span] = []
        self.publish_s: float | None = None
        """How long the copies to other devices took; None without any."""

    def run(self) -> bool:
        """Close the gate, update, open it again; pumps until readers may read.

        Returns whether the weights moved.

        Raises:
            UpdateError: too many votes failed in a row.
        """
        c = self._c
        c.record.enter(Phase.UPDATE)
        c.memory.enter(Phase.UPDATE)
        c.link.on(UpdateVote, self._on_vote)
        c.link.on(GradientsKept, self._on_gradients_kept)
        c.link.on(Drained, self._on_drained)
        c.link.on(UpdateApplied, self._on_applied)
        c.link.on(Published, self._on_published)
        c.link.on(UpdateSkipped, self._on_skipped)
        c.link.on(CachesDropped, self._on_caches_dropped)
        self._do(c.gate.close())
        c.link.pump(lambda: self._opened is not None)
        assert self._opened is not None, "pumped until it was"
        c.record.version = self._opened.version
        return self._opened.updated

    def _do(self, steps: Iterable[GateStep]) -> None:
        for step in steps:
            self._carry_out(step)

    def _carry_out(self, step: GateStep) -> None:
        c = self._c
        match step:
            case Prepare():
                self._ask(
                    Role.TRAINER,
                    lambda cause: PrepareUpdate(cause=cause, step=step.step, version=step.version),
                    f"sum gradients and vote (step {step.step})",
                )
            case DrainReader():
                self._ask(
                    Role(step.reader),
                    lambda cause: Drain(cause=cause, version=step.version),
                    f"read version {step.version} no more",
                )
            case JournalBegin():
                c.link.begin_atomic()
                c.record.append_durable(events.UpdateBegin(step=step.step, version=step.version))
                self._do(c.gate.begun_durable())
            case Apply():
                self._ask(
                    Role.TRAINER,
                    lambda cause: ApplyUpdate(cause=cause, step=step.step, version=step.version),
                    f"step the optimizer from version {step.version}",
                )
            case JournalCommit():
                c.record.append_durable(self._committed(step))
                c.digests = self._digests()
                c.link.end_atomic()
                self._do(c.gate.committed_durable())
            case Skip():
                self._ask(
                    Role.TRAINER,
                    lambda cause: SkipUpdate(cause=cause, step=step.step),
                    f"drop the gradients of step {step.step}",
                )
            case TellReader():
                self._ask(
                    Role(step.reader),
                    lambda cause: Committed(cause=cause, version=step.version),
                    f"drop caches for version {step.version}",
                )
            case Opened():
                self._opened = step
            case _:
                assert_never(step)

    def _committed(self, step: JournalCommit) -> events.UpdateCommitted:
        applied, published = self._applied.values(), self._published.values()
        return events.UpdateCommitted(
            step=step.step,
            version=step.version,
            digest=step.digest,
            start_s=min(answer.start_s for answer in applied),
            end_s=max(answer.end_s for answer in applied),
            refreshed_bytes=sum(answer.refreshed_bytes for answer in published),
            rebuilt_bytes=sum(answer.rebuilt_bytes for answer in published),
            published_s=max((answer.end_s for answer in published), default=None),
        )

    def _digests(self) -> dict[Device, str]:
        """Of the new weights."""
        if self._published:
            return {device: answer.digest for device, answer in self._published.items()}
        return {team.leader: answer.digest for team, answer in self._applied.items()}

    def _ask(self, role: Role, make: Callable[[int], object], what: str) -> None:
        teams = self._c.fleet.teams_of(role)
        self._silent[role] = len(teams)
        for team in teams:
            self._c.link.ask_team(team, lambda cause, _rank: make(cause), what, self._c.config.deadlines.update_s)

    def _last(self, role: Role) -> bool:
        """A team of the role has answered: whether it was the last one that had not."""
        self._silent[role] -= 1
        return not self._silent[role]

    def _span(self, devices: Sequence[Device], answer: Any) -> None:
        self.spans.append(Span(devices=tuple(devices), start_s=answer.start_s, end_s=answer.end_s))

    def _on_vote(self, peer: Peer, message: UpdateVote) -> None:
        team = self._c.link.team_of(peer)
        self._votes[team] = message
        self._span(team.devices, message)
        self._c.record.append(
            events.UnitDone(
                step=message.step,
                kind=events.UnitKind.VOTE,
                unit=team.index,
                service=str(peer),
                start_s=message.start_s,
                end_s=message.end_s,
            )
        )
        if self._last(Role.TRAINER):
            self._all_votes(same_vote(self._votes))

    def _all_votes(self, message: UpdateVote) -> None:
        self.metrics = dict(message.metrics)
        self._c.memory.trimmed(Role.TRAINER)
        if not message.finite:
            version = self._c.record.version
            reason = NO_REWARDS if self._no_rewards else "a gradient or the loss is not finite"
            self._c.record.append(events.UpdateSkipped(step=message.step, version=version, reason=reason))
        if message.finite and self._c.config.run.keep_gradients:
            file = self._c.run_dir / GRADIENTS / f"step_{message.step}.bin"
            self._c.link.ask_team(
                self._c.fleet.trainers[0].only(0),
                lambda cause, _rank: KeepGradients(cause=cause, step=message.step, file=str(file)),
                f"keep the gradients of step {message.step}",
                self._c.config.deadlines.checkpoint_s,
            )
        else:
            self._voted(finite=message.finite)

    def _on_gradients_kept(self, _peer: Peer, _message: GradientsKept) -> None:
        self._voted(finite=True)

    def _voted(self, *, finite: bool) -> None:
        try:
            self._do(self._c.gate.voted(finite=finite))
        except UpdateError as error:
            if not self._no_rewards:
                raise
            raise RewardError(
                f"{NO_REWARDS} again and again",
                got=error.got,
                needed="a group with rewards",
                do="logs/reward.log and GroupSkipped in the journal say why each group was left out.",
                where=error.where,
            ) from error

    @property
    def _no_rewards(self) -> bool:
        return self.metrics.get("groups_skipped") == self.metrics.get("groups")

    def _on_drained(self, peer: Peer, message: Drained) -> None:
        last = self._last(peer.role)
        if last:
            self._c.memory.trimmed(peer.role)
        if last or message.version != self._c.gate.version:  # which the gate refuses, whoever says it
            self._do(self._c.gate.reader_drained(peer.role, message.version))

    def _on_applied(self, peer: Peer, message: UpdateApplied) -> None:
        team = self._c.link.team_of(peer)
        self._applied[team] = message
        self._span(team.devices, message)
        if not self._last(Role.TRAINER):
            return
        if self._c.fleet.single:
            self._do(self._c.gate.applied(message.version, message.digest))
            return
        self._ask(
            Role.TRAINER,
            lambda cause: Publish(cause=cause, version=message.version),
            f"give version {message.version} to the other devices",
        )

    def _on_published(self, peer: Peer, message: Published) -> None:
        """Of each device one."""
        self._published[peer.device] = message
        self._span((peer.device,), message)
        if len(self._published) < len(self._c.fleet.training_devices):
            return
        answers = self._published.values()
        self.publish_s = max(answer.end_s for answer in answers) - min(answer.start_s for answer in answers)
        self.metrics["refreshed_bytes"] = float(sum(answer.refreshed_bytes for answer in answers))
        self.metrics["rebuilt_bytes"] = float(sum(answer.rebuilt_bytes for answer in answers))
        digests = {device: answer.digest for device, answer in self._published.items()}
        check_replicas(self._c.fleet, digests)
        self._do(self._c.gate.applied(message.version, combined(digests)))

    def _on_skipped(self, _peer: Peer, _message: UpdateSkipped) -> None:
        if self._last(Role.TRAINER):
            self._do(self._c.gate.skipped())

    def _on_caches_dropped(self, peer: Peer, message: CachesDropped) -> None:
        if self._last(peer.role) or message.version != self._c.gate.version:  # as above
            self._do(self._c.gate.caches_dropped(peer.role, message.version))
