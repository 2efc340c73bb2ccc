"""Carries out one training step: the schedule's instructions become orders, answers become its events.

Owns the hand-over between schedule, orders and what has been gathered. Decides nothing about order (schedule), memory
(ledger) or the update (gate).
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Iterable
from typing import TypeAlias, assert_never

from rollplex.journal import events
from rollplex.journal.events import UnitKind
from rollplex.protocol.common import Role
from rollplex.protocol.prefix import PrefixBackwardDone, PrefixReady, SuffixScored, Which
from rollplex.protocol.reward import GroupRewarded, RewardFailed
from rollplex.protocol.rollout import GroupFinished, Prefilled, UnitGenerated
from rollplex.protocol.trainer import SuffixTrained
from rollplex_coordinator.decisions.busy import Span
from rollplex_coordinator.decisions.instructions import (
    Ask,
    Backward,
    Complete,
    Enter,
    Forward,
    Generate,
    Instruction,
    Release,
    Reward,
    Score,
    Train,
)
from rollplex_coordinator.decisions.plan import StepPlan
from rollplex_coordinator.decisions.schedule import Schedule
from rollplex_coordinator.decisions.spread import mean_std
from rollplex_coordinator.processes.hub import Peer
from rollplex_coordinator.steps.context import Context
from rollplex_coordinator.steps.feed import StepInputs
from rollplex_coordinator.steps.gathered import Gathered
from rollplex_coordinator.steps.orders import Orders
from rollplex_coordinator.steps.problems import reward_error

_Timed: TypeAlias = UnitGenerated | PrefixReady | SuffixScored | SuffixTrained | PrefixBackwardDone


class TrainStep:
    """One step from the first token to the last backward.

    Args:
        context: the node.
        plan: the units of the step.
        schedule: decides when each unit is given out.
        inputs: the step's prompts.
    """

    def __init__(self, context: Context, plan: StepPlan, schedule: Schedule, inputs: StepInputs) -> None:
        self._c = context
        self._plan = plan
        self._schedule = schedule
        self._rows = inputs.rows
        self._step = context.record.step or 0
        self._g = Gathered()
        log_tokens = context.config.run.log_tokens
        self._orders = Orders(context, plan, inputs, self._g, return_logprobs=log_tokens)
        self._todo: deque[Instruction] = deque()
        self._doing = False

    def run(self) -> Gathered:
        """Do the step; pumps until every gradient of it is in the arenas."""
        on = self._c.link.on
        on(Prefilled, self._on_prefilled)
        on(GroupFinished, self._on_group_finished)
        on(UnitGenerated, self._on_generated)
        on(GroupRewarded, self._on_rewarded)
        on(RewardFailed, self._on_reward_failed)
        on(PrefixReady, self._on_prefix_ready)
        on(SuffixScored, self._on_scored)
        on(SuffixTrained, self._on_trained)
        on(PrefixBackwardDone, self._on_backward_done)
        self._c.record.open_groups = tuple(range(self._plan.num_groups))
        self._do(self._schedule.start())
        self._c.link.pump(lambda: self._schedule.complete)
        return self._g

    # --- instructions ---------------------------------------------------------------------------------------------

    def _do(self, instructions: Iterable[Instruction]) -> None:
        """Carry out instructions in order, also those that arise from carrying out one."""
        self._todo.extend(instructions)
        if self._doing:
            return
        self._doing = True
        try:
            while self._todo:
                self._carry_out(self._todo.popleft())
        finally:
            self._doing = False
        self._c.notice.say(beside=self._c.window.limited and self._schedule.beside)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Generate(unit=unit):
                self._orders.generate(unit)
            case Ask(which=which, unit=unit):
                self._orders.ask_memory(which, unit, lambda: self._do(self._schedule.granted(which, unit)))
            case Forward(which=which, unit=unit):
                self._orders.forward(which, unit, beside=self._schedule.beside)
            case Reward(group=group):
                self._orders.reward(group)
            case Score(unit=unit, release=release):
                self._orders.score(unit, release=release)
            case Train():
                self._orders.train(instruction)
            case Backward(unit=unit):
                self._orders.backward(unit)
            case Release(which=which, unit=unit):
                self._orders.give_back(which, unit)
            case Enter(phase=phase):
                self._c.record.enter(phase)
                self._c.memory.enter(phase)
            case Complete():
                pass
            case _:
                assert_never(instruction)

    # --- answers --------------------------------------------------------------------------------------------------

    def _on_prefilled(self, _peer: Peer, message: Prefilled) -> None:
        self._do(self._schedule.prefilled(message.unit))

    def _on_group_finished(self, _peer: Peer, message: GroupFinished) -> None:
        group = message.responses.group
        self._c.gate.group_sampled(group, message.version_start, message.version_end)
        self._g.responses[group] = message.responses
        self._g.rollout_logprobs[group] = message.logprobs
        self._g.stopped[group] = message.stopped
        self._c.record.append(
            events.GroupFinished(
                step=self._step,
                group=group,
                row=self._rows[group],
                lengths=message.responses.lengths,
                end_s=message.end_s,
            )
        )
        self._do(self._schedule.group_finished(group))

    def _on_generated(self, peer: Peer, message: UnitGenerated) -> None:
        start, end = self._g.rollout_span
        self._g.rollout_span = (min(start or message.start_s, message.start_s), max(end, message.end_s))
        self._unit(peer, UnitKind.GENERATE, message.unit, self._plan.decode[message.unit], message)
        self._c.memory.measured(message.held)
        self._orders.give_back("generate", message.unit)
        self._c.memory.trimmed(Role.ROLLOUT)
        self._do(self._schedule.generated(message.unit))

    def _on_rewarded(self, _peer: Peer, message: GroupRewarded) -> None:
        self._g.rewards[message.group] = message.rewards
        self._g.by_function[message.group] = message.by_function
        self._g.parts[message.group] = message.parts
        if message.group < max(self._c.config.run.log_completions, self._c.samples.wanted(self._step)):
            self._g.rewarded[message.group] = message
        mean, std = _mean_std(message.rewards)
        self._c.record.append(
            events.GroupRewarded(
                step=self._step,
                group=message.group,
                row=self._rows[message.group],
                mean=mean,
                std=std,
                start_s=message.start_s,
                end_s=message.end_s,
            )
        )
        self._do(self._schedule.group_rewarded(message.group))

    def _on_reward_failed(self, _peer: Peer, message: RewardFailed) -> None:
        """By policy the run ends, or the group has weight 0; it is never rewarded with 0."""
        if self._c.config.rewards.on_error == "fail":
            raise reward_error(message, f"step {message.step}")
        self._c.record.append(
            events.GroupSkipped(
                step=self._step,
                group=message.group,
                row=message.row,
                function=message.function,
                problem=message.problem,
                detail=message.detail[:4_000],
            )
        )
        self._g.skipped[message.group] = message
        nan = struct.pack("<d", float("nan"))
        self._g.rewards[message.group] = nan * len(self._g.responses[message.group].lengths)
        self._do(self._schedule.group_rewarded(message.group))

    def _on_prefix_ready(self, peer: Peer, message: PrefixReady) -> None:
        kind = UnitKind.ACTOR_PREFIX if message.which is Which.ACTOR else UnitKind.REFERENCE_PREFIX
        self._g.prefix_spans.append((message.start_s, message.end_s))
        self._unit(peer, kind, message.unit, self._plan.prefix[message.unit].groups, message)
        self._c.memory.measured(message.held)
        self._do(self._schedule.forward_done(message.which, message.unit))

    def _on_scored(self, peer: Peer, message: SuffixScored) -> None:
        for item in message.logprobs:
            self._g.reference_logprobs[item.group] = item
        groups = self._plan.suffix[message.suffix_unit].groups
        self._unit(peer, UnitKind.SCORE, message.suffix_unit, groups, message)
        self._c.memory.measured(message.held)
        self._orders.give_back("score", message.suffix_unit)
        self._do(self._schedule.scored(message.suffix_unit))

    def _on_trained(self, peer: Peer, message: SuffixTrained) -> None:
        for item in message.logprobs:
            self._g.trainer_logprobs[item.group] = item
        groups = self._plan.suffix[message.suffix_unit].groups
        self._unit(peer, UnitKind.SUFFIX, message.suffix_unit, groups, message)
        self._c.memory.measured(message.held)
        self._orders.give_back("train", message.suffix_unit)
        for group in groups:
            self._c.gate.group_trained(group)
        self._c.record.open_groups = tuple(g for g in self._c.record.open_groups if g not in groups)
        self._do(self._schedule.trained(message.suffix_unit))

    def _on_backward_done(self, peer: Peer, message: PrefixBackwardDone) -> None:
        groups = self._plan.prefix[message.unit].groups
        self._unit(peer, UnitKind.PREFIX_BACKWARD, message.unit, groups, message)
        self._c.memory.measured(message.held)
        self._orders.give_back("backward", message.unit)
        self._c.gate.prefix_backward_done(message.unit)
        self._do(self._schedule.backward_done(message.unit))

    def _unit(self, peer: Peer, kind: UnitKind, unit: int, groups: tuple[int, ...], answer: _Timed) -> None:
        """peer: who answered for its team."""
        devices = self._c.link.team_of(peer).devices
        self._g.spans.append(Span(devices=devices, start_s=answer.start_s, end_s=answer.end_s))
        self._c.record.append(
            events.UnitDone(
                step=self._step,
                kind=kind,
                unit=unit,
                service=str(peer),
                start_s=answer.start_s,
                end_s=answer.end_s,
                groups=groups,
                vision_prompts=answer.vision_prompts if isinstance(answer, UnitGenerated | PrefixReady) else 0,
                decode_start_s=answer.prefill_end_s if isinstance(answer, UnitGenerated) else None,
            )
        )


def _mean_std(rewards: bytes) -> tuple[float | None, float | None]:
    """Mean and (sample) standard deviation of the rewards that are there; NaN is an abstention."""
    values = [value for (value,) in struct.iter_unpack("<d", rewards) if math.isfinite(value)]
    return mean_std(values) if values else (None, None)
