"""Carries out one evaluation: greedy responses to every row at the present weights version. Changes nothing.

Owns the sums over rows. Knows nothing of when an evaluation is due.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollplex.config.job import EvalSection
from rollplex.config.wire import eval_sampling
from rollplex.data.order import batches
from rollplex.errors import RewardError
from rollplex.journal.events import EvalDone, EvalStarted
from rollplex.journal.phases import Phase
from rollplex.protocol.common import Role
from rollplex.protocol.reward import GroupRewarded, RewardFailed, RewardGroup, RewardPart
from rollplex.protocol.rollout import GenerateUnit, GroupFinished, Prefilled, UnitGenerated
from rollplex_coordinator.decisions.fleet import Team
from rollplex_coordinator.decisions.plan import cut
from rollplex_coordinator.decisions.reported import finite, mean, part_means
from rollplex_coordinator.memory.leasing import Blocks
from rollplex_coordinator.processes.hub import Peer
from rollplex_coordinator.records.completions import Completion, completions_of
from rollplex_coordinator.steps.context import Context
from rollplex_coordinator.steps.feed import StepInputs
from rollplex_coordinator.steps.problems import reward_error

KEY = 2**40
"""Inputs of evaluations have keys from here on; those of training steps are the steps."""
BATCHES = 2
"""Whose inputs are there at a time; with the next step's, as many as `memory.budget` plans."""


class Evaluation:
    """One pass over one evaluation's rows. The inputs of two batches are there at a time: of the one that is sampled,
    and of the next; what a pass that ended early left of others is given back before the first is made."""

    def __init__(self, context: Context, section: EvalSection) -> None:
        self._c = context
        self._section = section
        self._inputs: StepInputs | None = None
        self._first = 0
        self._generating: dict[int, Blocks] = {}
        """Units that are being sampled, and their K/V."""
        self._pending: set[int] = set()
        self._answers: dict[int, GroupFinished] = {}
        self._completions: list[Completion] = []
        self._lengths: list[int] = []
        self._rewards: list[float] = []
        self._by_function: dict[str, list[float]] = {}
        self._parts: list[RewardPart] = []

    def run(self) -> dict[str, float]:
        """Evaluate, journal and record the means; pumps until done.

        Raises:
            RewardError: a reward function failed; an evaluation leaves no row out.
        """
        c = self._c
        c.record.enter(Phase.EVAL)
        c.memory.enter(Phase.EVAL)
        c.link.on(Prefilled, lambda _peer, _message: None)  # nothing waits for it
        c.link.on(GroupFinished, self._on_group)
        c.link.on(UnitGenerated, self._on_generated)
        c.link.on(GroupRewarded, self._on_rewarded)
        c.link.on(RewardFailed, self._on_failed)
        step, name = c.record.step or 0, self._section.name
        size = c.config.data.prompts_per_iteration
        rows = batches(c.data.usable(name), size, limit=self._section.limit)
        c.record.append(EvalStarted(step=step, version=c.record.version, name=name, rows=sum(map(len, rows))))
        c.feed.drop_from(KEY + BATCHES)
        for index, batch in enumerate(rows):
            for ahead in range(index, min(index + BATCHES, len(rows))):
                c.feed.prepare(KEY + ahead, name, rows[ahead])
            self._first = index * size
            self._batch(KEY + index, index * len(c.fleet.engines), batch)
        metrics = self._means()
        row = {"name": name, "step": step, "version": c.record.version, **metrics}
        c.record.evaluation(row, sorted(self._completions, key=lambda completion: completion.group))
        c.record.append(EvalDone(step=step, version=c.record.version, name=name, metrics=dict(metrics)))
        c.record.enter(Phase.IDLE)
        c.memory.enter(Phase.IDLE)
        return metrics

    def _batch(self, key: int, first: int, rows: Sequence[int]) -> None:
        """Rows that are sampled at once, an equal share by each engine. first: number of the batch's first unit."""
        c = self._c
        inputs = self._inputs = c.feed.take(key)
        self._pending = set(range(len(rows)))
        share = -(-c.config.data.prompts_per_iteration // len(c.fleet.engines))
        for engine, members in enumerate(cut(range(len(rows)), share)):
            self._generate(first + engine, c.fleet.engines[engine], inputs, members)
        c.link.pump(lambda: not self._generating and not self._pending)
        c.feed.done(inputs)

    def _generate(self, unit: int, team: Team, inputs: StepInputs, members: Sequence[int]) -> None:
        c = self._c
        prompts = tuple(inputs.prompts[member] for member in members)
        sampling = eval_sampling(c.config, self._section.name, stop_ids=c.data.stop_ids)
        kv = self._generating[unit] = c.memory.now(
            c.sizes.wants.rollout_kv(prompts, sampling, unit), devices=team.devices
        )
        c.link.ask_team(
            team,
            lambda cause, rank: GenerateUnit(
                cause=cause,
                step=c.record.step or 0,
                version=c.record.version,
                unit=unit,
                inputs=inputs.ref,
                prompts=prompts,
                sampling=sampling,
                kv=kv.on(rank).private,
            ),
            f"evaluate rows {inputs.rows[members[0]]}-{inputs.rows[members[-1]]} of {self._section.name}",
            c.unit_s,
        )

    def _on_group(self, _peer: Peer, message: GroupFinished) -> None:
        assert self._inputs is not None, "a batch is running"
        group = message.responses.group
        version = self._c.record.version
        assert message.version_start == message.version_end == version, "nothing moves the weights meanwhile"
        row = self._inputs.rows[group]
        self._lengths.extend(message.responses.lengths)
        self._answers[group] = message
        self._c.link.ask(
            Role.REWARD,
            lambda cause: RewardGroup(
                cause=cause,
                step=self._c.record.step or 0,
                source=self._section.name,
                row=row,
                responses=message.responses,
                stopped=message.stopped,
            ),
            f"reward row {row} of {self._section.name}",
            self._c.reward_s,
        )

    def _on_generated(self, _peer: Peer, message: UnitGenerated) -> None:
        self._c.memory.measured(message.held)
        self._c.memory.trimmed(Role.ROLLOUT)
        self._c.memory.release(self._generating.pop(message.unit))

    def _on_rewarded(self, _peer: Peer, message: GroupRewarded) -> None:
        self._pending.discard(message.group)
        self._rewards += finite(message.rewards)
        self._parts += message.parts
        functions = self._c.config.rewards.functions
        for function, values in zip(functions, message.by_function, strict=True):
            self._by_function.setdefault(function.name, []).extend(finite(values))
        assert self._inputs is not None, "a batch is running"
        answer = self._answers.pop(message.group)
        self._completions += completions_of(
            message,
            source=self._section.name,
            version=self._c.record.version,
            row=self._inputs.rows[message.group],
            group=self._first + message.group,
            lengths=answer.responses.lengths,
            stopped=answer.stopped,
            names=[function.name for function in functions],
        )

    def _on_failed(self, _peer: Peer, message: RewardFailed) -> None:
        raise reward_error(message, f"evaluation {self._section.name}")

    def _means(self) -> dict[str, float]:
        if not self._rewards:
            raise RewardError(
                f"evaluation {self._section.name} has no reward",
                got="None from every function for every row",
                needed="at least one number",
                do="Let a reward function score these rows.",
            )
        metrics = {"reward": mean(self._rewards), "count": float(len(self._lengths))}
        metrics["completions/mean_length"] = mean([float(n) for n in self._lengths])
        for name, values in self._by_function.items():
            metrics[f"rewards/{name}/mean"] = mean(values)
        names = [function.name for function in self._c.config.rewards.functions]
        metrics |= part_means(names, self._parts)
        return metrics
