"""Turns a step's instructions into messages: what to take from memory, what to send, what to say about it.

Owns the blocks of the units that are under way. A unit is computed by one team, of which each rank is told of the
leases and segments on its own device. Decides nothing about order (schedule) and hears no answers (step).
"""

from __future__ import annotations

from collections.abc import Callable

from rollplex.config.checks import TRAIN
from rollplex.protocol.common import PromptSlot, Role, SegmentRef
from rollplex.protocol.prefix import Activations, PrefixBackward, PrefixForward, ScoreSuffix, Which
from rollplex.protocol.reward import RewardGroup
from rollplex.protocol.rollout import GenerateUnit
from rollplex.protocol.trainer import Scale, TrainSuffix
from rollplex_coordinator.decisions.fleet import Team
from rollplex_coordinator.decisions.instructions import Train
from rollplex_coordinator.decisions.plan import StepPlan
from rollplex_coordinator.memory.leasing import Blocks, Want
from rollplex_coordinator.steps.context import Context
from rollplex_coordinator.steps.feed import StepInputs
from rollplex_coordinator.steps.gathered import Gathered


class Orders:
    """The messages of one step.

    Args:
        context: the node.
        plan: the units of the step.
        inputs: its prompts.
        gathered: responses and rewards, as they come in.
        return_logprobs: the trainer is to answer with its log-probabilities.
    """

    def __init__(
        self,
        context: Context,
        plan: StepPlan,
        inputs: StepInputs,
        gathered: Gathered,
        *,
        return_logprobs: bool = False,
    ) -> None:
        self._c = context
        self._plan = plan
        self._inputs = inputs
        self._g = gathered
        self._return_logprobs = return_logprobs
        self._batch_rewards = context.config.algorithm.scale_rewards is Scale.BATCH
        self._step = context.record.step or 0
        self._version = context.record.version
        self._blocks: dict[tuple[str, int], tuple[Blocks, ...]] = {}

    def generate(self, unit: int) -> None:
        """Rollout: sample a decode unit."""
        prompts = tuple(self._inputs.prompts[g] for g in self._plan.decode[unit])
        team = self._c.fleet.engines[self._plan.engine_of(unit)]
        kv = self._now(team, self._c.sizes.wants.rollout_kv(prompts, self._c.sampling, unit))
        self._blocks["generate", unit] = (kv,)
        self._c.link.ask_team(
            team,
            lambda cause, rank: GenerateUnit(
                cause=cause,
                step=self._step,
                version=self._version,
                unit=unit,
                inputs=self._inputs.ref,
                prompts=prompts,
                sampling=self._c.sampling,
                kv=kv.on(rank).private,
            ),
            f"sample groups {span(self._plan.decode[unit])} (decode unit {unit}, step {self._step})",
            self._c.unit_s,
        )

    def ask_memory(self, which: Which, unit: int, then: Callable[[], None]) -> None:
        """Ledger: memory for a prefix unit; `then` is called once it is granted, perhaps at once."""
        prompts = self._prompts(unit)
        wants = self._c.sizes.wants.prefix_unit(which, prompts, unit)

        def granted(blocks: tuple[Blocks, ...]) -> None:
            self._blocks[which, unit] = blocks
            then()

        self._c.memory.when_free(wants, granted, devices=self._prefix_team(unit).devices)

    def forward(self, which: Which, unit: int, *, beside: bool = False) -> None:
        """Prefix: forward pass of a prefix unit.

        Args:
            beside: it runs beside a rollout that is going on.
        """
        prompts = self._prompts(unit)
        private = next((blocks for blocks in self._blocks[which, unit] if blocks.leader.segment is None), None)
        self._c.link.ask_team(
            self._prefix_team(unit),
            lambda cause, rank: PrefixForward(
                cause=cause,
                step=self._step,
                version=self._version,
                unit=unit,
                which=which,
                inputs=self._inputs.ref,
                prompts=prompts,
                copies=self._c.sizes.copies,
                lease=None if private is None else private.on(rank).private,
                kv=self._segment(unit, rank) if which is Which.ACTOR else None,
                activations=Activations(self._c.config.memory.prefix_activations),
                share=self._c.window.share(beside=beside),
            ),
            f"{which} prefix of groups {span(self._plan.prefix[unit].groups)} (unit {unit}, step {self._step})",
            self._c.unit_s,
        )

    def reward(self, group: int) -> None:
        """Reward child: score a finished group."""
        self._c.link.ask(
            Role.REWARD,
            lambda cause: RewardGroup(
                cause=cause,
                step=self._step,
                source=TRAIN,
                row=self._inputs.rows[group],
                responses=self._g.responses[group],
                stopped=self._g.stopped[group],
            ),
            f"reward group {group} (row {self._inputs.rows[group]}, step {self._step})",
            self._c.reward_s,
        )

    def score(self, unit: int, *, release: bool) -> None:
        """Prefix: reference log-probabilities of a suffix unit."""
        suffix = self._plan.suffix[unit]
        responses = tuple(self._g.responses[g] for g in suffix.groups)
        team = self._prefix_team(suffix.prefix)
        workspace = self._now(team, self._c.sizes.wants.score_workspace(responses, unit))
        self._blocks["score", unit] = (workspace,)
        self._c.link.ask_team(
            team,
            lambda cause, rank: ScoreSuffix(
                cause=cause,
                step=self._step,
                unit=suffix.prefix,
                suffix_unit=unit,
                responses=responses,
                workspace=workspace.on(rank).private,
                release=release,
            ),
            f"score groups {span(suffix.groups)} under the reference (step {self._step})",
            self._c.unit_s,
        )

    def train(self, train: Train) -> None:
        """Trainer: forward and backward of a suffix unit."""
        suffix = self._plan.suffix[train.unit]
        responses = tuple(self._g.responses[g] for g in suffix.groups)
        prompts = self._prompts(suffix.prefix)
        team = self._c.fleet.trainers[self._plan.replica_of(suffix.prefix)]
        wants = self._c.sizes.wants.train_workspace(prompts, responses, train.unit)
        graph, scratch = (self._now(team, want) for want in wants)
        self._blocks["train", train.unit] = (graph, scratch)
        batch = b"".join(self._g.rewards[g] for g in range(self._plan.num_groups)) if self._batch_rewards else b""
        self._c.link.ask_team(
            team,
            lambda cause, rank: TrainSuffix(
                cause=cause,
                step=self._step,
                version=self._version,
                unit=suffix.prefix,
                suffix_unit=train.unit,
                prompts=prompts,
                copies=self._c.sizes.copies,
                kv=self._segment(suffix.prefix, rank),
                first=train.first,
                release=train.release,
                responses=responses,
                rollout_logprobs=tuple(self._g.rollout_logprobs[g] for g in suffix.groups),
                reference_logprobs=tuple(
                    self._g.reference_logprobs[g] for g in suffix.groups if g in self._g.reference_logprobs
                ),
                rewards=tuple(self._g.rewards[g] for g in suffix.groups),
                batch_rewards=batch,
                workspace=graph.on(rank).private,
                scratch=scratch.on(rank).private,
                return_logprobs=self._return_logprobs,
            ),
            f"train groups {span(suffix.groups)} (step {self._step})",
            self._c.unit_s,
        )

    def backward(self, unit: int) -> None:
        """Prefix: backward of a prefix unit."""
        team = self._prefix_team(unit)
        want = self._c.sizes.wants.backward_workspace(self._prompts(unit), unit)
        workspace = () if want is None else (self._now(team, want),)
        self._blocks["backward", unit] = workspace
        self._c.link.ask_team(
            team,
            lambda cause, rank: PrefixBackward(
                cause=cause,
                step=self._step,
                version=self._version,
                unit=unit,
                workspace=workspace[0].on(rank).private if workspace else None,
            ),
            f"prefix backward of groups {span(self._plan.prefix[unit].groups)} (unit {unit}, step {self._step})",
            self._c.unit_s,
        )

    def _prefix_team(self, unit: int) -> Team:
        return self._c.fleet.prefixes[self._plan.replica_of(unit)]

    def _now(self, team: Team, want: Want) -> Blocks:
        return self._c.memory.now(want, devices=team.devices)

    def _segment(self, unit: int, rank: int) -> SegmentRef:
        """K/V of an actor prefix unit, and their gradients, on the device of a rank: the unit's last block."""
        return self._blocks[Which.ACTOR, unit][-1].on(rank).ref

    def _prompts(self, unit: int) -> tuple[PromptSlot, ...]:
        return tuple(self._inputs.prompts[g] for g in self._plan.prefix[unit].groups)

    def give_back(self, what: str, unit: int) -> None:
        """Release what a unit held; `what` is generate, score, train, backward, or a `Which`."""
        for blocks in reversed(self._blocks.pop((what, unit))):
            self._c.memory.release(blocks)
        if what is Which.REFERENCE or (what is Which.ACTOR and not self._c.sizes.recompute):
            # What was kept from a forward on is private: the prefix process trims when it lets go of it.
            self._c.memory.trimmed(Role.PREFIX, self._prefix_team(unit).devices)


def span(groups: tuple[int, ...]) -> str:
    """First and last group in words."""
    return "-".join(str(group) for group in sorted({min(groups), max(groups)}))
