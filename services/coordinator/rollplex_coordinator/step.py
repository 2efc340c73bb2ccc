"""Carries out one training step: the schedule's instructions become messages, answers become its events.

Owns what the step has gathered so far: responses, log-probabilities, rewards. Decides nothing about order (schedule),
memory (ledger) or the update (gate).
"""

from __future__ import annotations

import math
import statistics
import struct
from collections import deque
from collections.abc import Iterable
from typing import assert_never

from rollplex.config.checks import TRAIN
from rollplex.protocol import prefix as to_prefix
from rollplex.protocol.common import Logprobs, PromptSlot, Responses, Role
from rollplex.protocol.prefix import PrefixBackwardDone, PrefixReady, SuffixScored, Which
from rollplex.protocol.reward import GroupRewarded, RewardFailed, RewardGroup, RewardProblem
from rollplex.protocol.rollout import GenerateUnit, GroupFinished, UnitGenerated
from rollplex.protocol.trainer import Scale, SuffixTrained, TrainSuffix
from rollplex_coordinator import events
from rollplex_coordinator.context import Context
from rollplex_coordinator.feed import StepInputs
from rollplex_coordinator.hub import Peer
from rollplex_coordinator.memory import Block
from rollplex_coordinator.plan import StepPlan
from rollplex_coordinator.problems import reward_error
from rollplex_coordinator.schedule import (
    Ask,
    Backward,
    Complete,
    Enter,
    Forward,
    Generate,
    Instruction,
    Release,
    Reward,
    Schedule,
    Score,
    Train,
)


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
        self._inputs = inputs
        self._batch_rewards = context.config.algorithm.scale_rewards is Scale.BATCH
        self._step = context.record.step or 0
        self._version = context.record.version
        self._todo: deque[Instruction] = deque()
        self._doing = False
        self._blocks: dict[tuple[str, int], tuple[Block, ...]] = {}
        self.responses: dict[int, Responses] = {}
        self.rewards: dict[int, bytes] = {}
        self.skipped: dict[int, RewardFailed] = {}
        self.prefix_spans: list[tuple[float, float]] = []
        self.rollout_span = (0.0, 0.0)
        self._rollout_logprobs: dict[int, Logprobs] = {}
        self._reference_logprobs: dict[int, Logprobs] = {}
        self.by_function: dict[int, tuple[bytes, ...]] = {}
        self.stopped: dict[int, tuple[bool, ...]] = {}

    def run(self) -> None:
        """Do the step; pumps until every gradient of it is in the arenas."""
        on = self._c.link.on
        on(GroupFinished, self._on_group_finished)
        on(UnitGenerated, self._on_generated)
        on(GroupRewarded, self._on_rewarded)
        on(RewardFailed, self._on_reward_failed)
        on(PrefixReady, self._on_prefix_ready)
        on(SuffixScored, self._on_scored)
        on(SuffixTrained, self._on_trained)
        on(PrefixBackwardDone, self._on_backward_done)
        self._do(self._schedule.start())
        self._c.link.pump(lambda: self._schedule.complete)

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

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Generate(unit=unit):
                self._generate(unit)
            case Ask(which=which, unit=unit):
                self._ask_memory(which, unit)
            case Forward(which=which, unit=unit):
                self._forward(which, unit)
            case Reward(group=group):
                self._reward(group)
            case Score(unit=unit, release=release):
                self._score(unit, release=release)
            case Train():
                self._train(instruction)
            case Backward(unit=unit):
                self._backward(unit)
            case Release(which=which, unit=unit):
                for block in reversed(self._blocks.pop((which, unit))):
                    self._c.memory.release(block)
            case Enter(phase=phase):
                self._c.record.enter(phase)
                self._c.memory.enter(phase)
            case Complete():
                pass
            case _:
                assert_never(instruction)

    def _generate(self, unit: int) -> None:
        prompts = tuple(self._inputs.prompts[g] for g in self._plan.decode[unit])
        block = self._c.memory.now(self._c.sizes.rollout_kv(prompts, self._c.sampling, unit))
        self._blocks["generate", unit] = (block,)
        self._c.link.ask(
            Role.ROLLOUT,
            lambda cause: GenerateUnit(
                cause=cause,
                step=self._step,
                version=self._version,
                unit=unit,
                inputs=self._inputs.ref,
                prompts=prompts,
                sampling=self._c.sampling,
                kv=block.private,
            ),
            f"sample groups {_span(self._plan.decode[unit])} (decode unit {unit}, step {self._step})",
            self._c.unit_s,
        )

    def _ask_memory(self, which: Which, unit: int) -> None:
        prompts = self._prompts(unit)
        wants = self._c.sizes.prefix_unit(which, prompts, unit)

        def granted(blocks: tuple[Block, ...]) -> None:
            self._blocks[which, unit] = blocks
            self._do(self._schedule.granted(which, unit))

        self._c.memory.when_free(wants, granted)

    def _forward(self, which: Which, unit: int) -> None:
        prompts = self._prompts(unit)
        private, *shared = self._blocks[which, unit]
        self._c.link.ask(
            Role.PREFIX,
            lambda cause: to_prefix.PrefixForward(
                cause=cause,
                step=self._step,
                version=self._version,
                unit=unit,
                which=which,
                inputs=self._inputs.ref,
                prompts=prompts,
                copies=self._c.sizes.copies,
                lease=private.private,
                kv=shared[0].ref if shared else None,
            ),
            f"{which} prefix of groups {_span(self._plan.prefix[unit].groups)} (unit {unit}, step {self._step})",
            self._c.unit_s,
        )

    def _reward(self, group: int) -> None:
        self._c.link.ask(
            Role.REWARD,
            lambda cause: RewardGroup(
                cause=cause,
                step=self._step,
                source=TRAIN,
                row=self._inputs.rows[group],
                responses=self.responses[group],
            ),
            f"reward group {group} (row {self._inputs.rows[group]}, step {self._step})",
            self._c.reward_s,
        )

    def _score(self, unit: int, *, release: bool) -> None:
        suffix = self._plan.suffix[unit]
        responses = tuple(self.responses[g] for g in suffix.groups)
        block = self._c.memory.now(self._c.sizes.score_workspace(responses, unit))
        self._blocks["score", unit] = (block,)
        self._c.link.ask(
            Role.PREFIX,
            lambda cause: to_prefix.ScoreSuffix(
                cause=cause,
                step=self._step,
                unit=suffix.prefix,
                suffix_unit=unit,
                responses=responses,
                workspace=block.private,
                release=release,
            ),
            f"score groups {_span(suffix.groups)} under the reference (step {self._step})",
            self._c.unit_s,
        )

    def _train(self, train: Train) -> None:
        suffix = self._plan.suffix[train.unit]
        responses = tuple(self.responses[g] for g in suffix.groups)
        prompts = self._prompts(suffix.prefix)
        wants = self._c.sizes.train_workspace(prompts, responses, train.unit)
        graph, scratch = (self._c.memory.now(want) for want in wants)
        self._blocks["train", train.unit] = (graph, scratch)
        batch = b"".join(self.rewards[g] for g in range(self._plan.num_groups)) if self._batch_rewards else b""
        self._c.link.ask(
            Role.TRAINER,
            lambda cause: TrainSuffix(
                cause=cause,
                step=self._step,
                version=self._version,
                unit=suffix.prefix,
                suffix_unit=train.unit,
                prompts=prompts,
                copies=self._c.sizes.copies,
                kv=self._blocks[Which.ACTOR, suffix.prefix][1].ref,
                first=train.first,
                release=train.release,
                responses=responses,
                rollout_logprobs=tuple(self._rollout_logprobs[g] for g in suffix.groups),
                reference_logprobs=tuple(
                    self._reference_logprobs[g] for g in suffix.groups if g in self._reference_logprobs
                ),
                rewards=tuple(self.rewards[g] for g in suffix.groups),
                batch_rewards=batch,
                workspace=graph.private,
            ),
            f"train groups {_span(suffix.groups)} (step {self._step})",
            self._c.unit_s,
        )

    def _backward(self, unit: int) -> None:
        self._c.link.ask(
            Role.PREFIX,
            lambda cause: to_prefix.PrefixBackward(cause=cause, step=self._step, version=self._version, unit=unit),
            f"prefix backward of groups {_span(self._plan.prefix[unit].groups)} (unit {unit}, step {self._step})",
            self._c.unit_s,
        )

    # --- answers --------------------------------------------------------------------------------------------------

    def _on_group_finished(self, _peer: Peer, message: GroupFinished) -> None:
        group = message.responses.group
        self._c.gate.group_sampled(group, message.version_start, message.version_end)
        self.responses[group] = message.responses
        self._rollout_logprobs[group] = message.logprobs
        self.stopped[group] = message.stopped
        self._c.record.append(
            events.GroupFinished(
                step=self._step,
                group=group,
                row=self._inputs.rows[group],
                lengths=message.responses.lengths,
                end_s=message.end_s,
            )
        )
        self._do(self._schedule.group_finished(group))

    def _on_generated(self, peer: Peer, message: UnitGenerated) -> None:
        start, end = self.rollout_span
        self.rollout_span = (start or message.start_s, max(end, message.end_s))
        self._unit(
            peer,
            events.UnitKind.GENERATE,
            message.unit,
            message.start_s,
            message.end_s,
            self._plan.decode[message.unit],
            message.vision_prompts,
        )
        self._c.memory.measured(message.held)
        self._give_back("generate", message.unit)
        self._do(self._schedule.generated(message.unit))

    def _on_rewarded(self, _peer: Peer, message: GroupRewarded) -> None:
        self.rewards[message.group] = message.rewards
        self.by_function[message.group] = message.by_function
        mean, std = _mean_std(message.rewards)
        self._c.record.append(
            events.GroupRewarded(
                step=self._step,
                group=message.group,
                row=self._inputs.rows[message.group],
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
        self.skipped[message.group] = message
        nan = struct.pack("<d", float("nan"))
        self.rewards[message.group] = nan * len(self.responses[message.group].lengths)
        if message.problem is RewardProblem.TIMED_OUT:
            self._c.restart_rewards()
            for group in sorted(self.responses.keys() - self.rewards.keys()):
                self._reward(group)
        self._do(self._schedule.group_rewarded(message.group))

    def _on_prefix_ready(self, peer: Peer, message: PrefixReady) -> None:
        kind = events.UnitKind.ACTOR_PREFIX if message.which is Which.ACTOR else events.UnitKind.REFERENCE_PREFIX
        self.prefix_spans.append((message.start_s, message.end_s))
        self._unit(
            peer,
            kind,
            message.unit,
            message.start_s,
            message.end_s,
            self._plan.prefix[message.unit].groups,
            message.vision_prompts,
        )
        self._c.memory.measured(message.held)
        self._do(self._schedule.forward_done(message.which, message.unit))

    def _on_scored(self, peer: Peer, message: SuffixScored) -> None:
        for item in message.logprobs:
            self._reference_logprobs[item.group] = item
        groups = self._plan.suffix[message.suffix_unit].groups
        self._unit(peer, events.UnitKind.SCORE, message.suffix_unit, message.start_s, message.end_s, groups)
        self._c.memory.measured(message.held)
        self._give_back("score", message.suffix_unit)
        self._do(self._schedule.scored(message.suffix_unit))

    def _on_trained(self, peer: Peer, message: SuffixTrained) -> None:
        groups = self._plan.suffix[message.suffix_unit].groups
        self._unit(peer, events.UnitKind.SUFFIX, message.suffix_unit, message.start_s, message.end_s, groups)
        self._c.memory.measured(message.held)
        self._give_back("train", message.suffix_unit)
        for group in groups:
            self._c.gate.group_trained(group)
        self._do(self._schedule.trained(message.suffix_unit))

    def _on_backward_done(self, peer: Peer, message: PrefixBackwardDone) -> None:
        groups = self._plan.prefix[message.unit].groups
        self._unit(peer, events.UnitKind.PREFIX_BACKWARD, message.unit, message.start_s, message.end_s, groups)
        self._c.gate.prefix_backward_done(message.unit)
        self._do(self._schedule.backward_done(message.unit))

    # --- small things ---------------------------------------------------------------------------------------------

    def _prompts(self, unit: int) -> tuple[PromptSlot, ...]:
        return tuple(self._inputs.prompts[g] for g in self._plan.prefix[unit].groups)

    def _give_back(self, what: str, unit: int) -> None:
        for block in self._blocks.pop((what, unit)):
            self._c.memory.release(block)

    def _unit(
        self,
        peer: Peer,
        kind: events.UnitKind,
        unit: int,
        start_s: float,
        end_s: float,
        groups: tuple[int, ...],
        vision_prompts: int = 0,
    ) -> None:
        self._c.record.append(
            events.UnitDone(
                step=self._step,
                kind=kind,
                unit=unit,
                service=str(peer),
                start_s=start_s,
                end_s=end_s,
                groups=groups,
                vision_prompts=vision_prompts,
            )
        )


def _span(groups: tuple[int, ...]) -> str:
    return "-".join(str(group) for group in sorted({min(groups), max(groups)}))


def _mean_std(rewards: bytes) -> tuple[float | None, float | None]:
    """Mean and (sample) standard deviation of the rewards that are there; NaN is an abstention."""
    values = [value for (value,) in struct.iter_unpack("<d", rewards) if math.isfinite(value)]
    if not values:
        return None, None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
