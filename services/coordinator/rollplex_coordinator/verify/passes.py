"""Carries out the ways to compute one group, each as a step of its own that is never applied.

    rollout     tokens and their log-probabilities, as in training
    split(1)    prefix once, suffix of every response, prefix backward: what training does
    split(G)    the same with one prefix per response
    whole       prompt and response in one, by a model that splits nothing

After a pass the trainer's arena holds the summed gradients, until `forget`. Owns the order of messages, leases and
phases. Does not know: what is compared.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
from msgspec import Struct

from rollplex.errors import StateError
from rollplex.journal.phases import Phase
from rollplex.protocol.common import CachesDropped, Committed, Drain, Drained, Logprobs, Role
from rollplex.protocol.prefix import PrefixBackwardDone, PrefixReady, SuffixScored, Which
from rollplex.protocol.rollout import GroupFinished, Prefilled, UnitGenerated
from rollplex.protocol.trainer import (
    PrepareUpdate,
    SkipUpdate,
    SuffixTrained,
    TrainWhole,
    UpdateSkipped,
    UpdateVote,
    WholeTrained,
)
from rollplex_coordinator.decisions.instructions import Train
from rollplex_coordinator.decisions.plan import plan_step
from rollplex_coordinator.steps.context import Context
from rollplex_coordinator.steps.feed import StepInputs
from rollplex_coordinator.steps.gathered import Gathered
from rollplex_coordinator.steps.orders import Orders
from rollplex_coordinator.verify.gradients import Float64s

READERS = (Role.PREFIX, Role.ROLLOUT)
AnswerT = TypeVar("AnswerT")


class Split(Struct, frozen=True, kw_only=True):
    """Log-probabilities of all response tokens, one sample after the other. reference: None without one."""

    trainer: Float64s
    reference: Float64s | None


class Passes:
    """The passes over one group.

    Args:
        context: the node; its configuration is `check.checked`.
        inputs: one prompt.
    """

    def __init__(self, context: Context, inputs: StepInputs) -> None:
        self._c = context
        self._inputs = inputs
        self._plan = plan_step(1, decode_prompts=1, prefix_prompts=1, suffix_prompts=1)
        self._step = 0
        self._sampled = Gathered()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the sampled responses, tokens."""
        return self._sampled.responses[0].lengths

    def rollout(self) -> Float64s:
        """Sample the group; log-probabilities as sampled."""
        c = self._c
        self._enter(Phase.ROLLOUT)
        orders = self._orders(c)
        finished: list[GroupFinished] = []
        c.link.on(Prefilled, lambda _peer, _message: None)  # nothing waits for it
        c.link.on(GroupFinished, lambda _peer, message: finished.append(message))
        generated = self._answer(UnitGenerated, lambda: orders.generate(0))
        c.memory.measured(generated.held)
        orders.give_back("generate", 0)
        c.memory.trimmed(Role.ROLLOUT)
        (group,) = finished
        if not group.version_start == group.version_end == c.record.version:
            raise StateError(
                "The group was not sampled from the weights",
                got=f"versions {group.version_start} to {group.version_end}",
                needed=f"version {c.record.version}",
            )
        self._sampled.responses[0] = group.responses
        self._sampled.rollout_logprobs[0] = group.logprobs
        self._sampled.rewards[0] = spread_rewards(len(group.responses.lengths))
        self._enter(Phase.IDLE)
        return numbers(group.logprobs)

    def split(self, copies: int) -> Split:
        """The passes of training, with so many copies of the prompt; gradients are left in the trainer's arena."""
        c = replace(self._c, sizes=self._c.sizes.with_copies(copies))
        orders = self._orders(c)
        self._enter(Phase.ROLLOUT)
        reference = None
        if c.config.needs_reference:
            self._prefix(orders, Which.REFERENCE)
            self._enter(Phase.SCORE)
            scored = self._answer(SuffixScored, lambda: orders.score(0, release=True))
            c.memory.measured(scored.held)
            orders.give_back("score", 0)
            orders.give_back(Which.REFERENCE, 0)
            self._sampled.reference_logprobs[0] = scored.logprobs[0]
            reference = numbers(scored.logprobs[0])
        self._prefix(orders, Which.ACTOR)
        self._enter(Phase.TRAIN)
        trained = self._answer(SuffixTrained, lambda: orders.train(Train(unit=0, first=True, release=True)))
        c.memory.measured(trained.held)
        orders.give_back("train", 0)
        done = self._answer(PrefixBackwardDone, lambda: orders.backward(0))
        c.memory.measured(done.held)
        orders.give_back("backward", 0)
        orders.give_back(Which.ACTOR, 0)
        self._prepare()
        return Split(trainer=numbers(trained.logprobs[0]), reference=reference)

    def whole(self) -> Float64s:
        """The slow path, after a `split`, whose reference log-probabilities it takes; gradients as there."""
        c, g = self._c, self._sampled
        c.record.step = self._step
        self._enter(Phase.TRAIN)
        (prompt,) = self._inputs.prompts
        graph, scratch = (c.memory.now(want) for want in c.sizes.wants.whole_workspace(prompt, g.responses[0]))
        reference = g.reference_logprobs.get(0)
        answer = c.link.call(
            Role.TRAINER,
            lambda cause: TrainWhole(
                cause=cause,
                step=self._step,
                version=c.record.version,
                inputs=self._inputs.ref,
                prompts=(prompt,),
                responses=(g.responses[0],),
                rollout_logprobs=(g.rollout_logprobs[0],),
                reference_logprobs=() if reference is None else (reference,),
                rewards=(g.rewards[0],),
                batch_rewards=g.rewards[0],
                workspace=graph.private,
                scratch=scratch.private,
            ),
            "train the group's sequences without a split",
            c.unit_s * len(self.lengths),  # one response after the other, each as long as a unit may take
            WholeTrained,
        )
        c.memory.measured(answer.held)
        for block in (scratch, graph):
            c.memory.release(block)
        self._prepare()
        return numbers(answer.logprobs[0])

    def forget(self) -> None:
        """Drop the pass's gradients, as the gate does after a failed vote; the next pass is another step."""
        c, version = self._c, self._c.record.version
        update_s = c.config.deadlines.update_s
        c.link.call_many(
            dict.fromkeys(READERS, lambda cause: Drain(cause=cause, version=version)),
            f"read version {version} no more",
            update_s,
            Drained,
        )
        c.link.call(
            Role.TRAINER,
            lambda cause: SkipUpdate(cause=cause, step=self._step),
            f"drop the gradients of pass {self._step}",
            update_s,
            UpdateSkipped,
        )
        c.link.call_many(
            dict.fromkeys(READERS, lambda cause: Committed(cause=cause, version=version)),
            f"drop caches for version {version}",
            update_s,
            CachesDropped,
        )
        self._enter(Phase.IDLE)
        self._step += 1

    # --- parts ----------------------------------------------------------------------------------------------------

    def _orders(self, context: Context) -> Orders:
        context.record.step = self._step
        return Orders(context, self._plan, self._inputs, self._sampled, return_logprobs=True)

    def _prefix(self, orders: Orders, which: Which) -> None:
        granted: list[bool] = []
        orders.ask_memory(which, 0, lambda: granted.append(True))
        self._c.link.pump(lambda: bool(granted))
        self._c.memory.measured(self._answer(PrefixReady, lambda: orders.forward(which, 0)).held)

    def _prepare(self) -> None:
        """Sum the arenas. A vote against the update is no matter here: what is not finite, the comparison finds."""
        c = self._c
        self._enter(Phase.UPDATE)
        c.link.call(
            Role.TRAINER,
            lambda cause: PrepareUpdate(cause=cause, step=self._step, version=c.record.version),
            f"sum the gradients of pass {self._step}",
            c.config.deadlines.update_s,
            UpdateVote,
        )

    def _answer(self, kind: type[AnswerT], ask: Callable[[], None]) -> AnswerT:
        answers: list[AnswerT] = []
        self._c.link.on(kind, lambda _peer, message: answers.append(message))
        ask()
        self._c.link.pump(lambda: bool(answers))
        return answers[0]

    def _enter(self, phase: Phase) -> None:
        self._c.record.enter(phase)
        self._c.memory.enter(phase)


def spread_rewards(count: int) -> bytes:
    """0 to 1 in equal steps, float64: whatever the user's functions say, every sample but one has an advantage."""
    return struct.pack(f"<{count}d", *(sample / max(1, count - 1) for sample in range(count)))


def numbers(logprobs: Logprobs) -> Float64s:
    """Off the wire."""
    return np.frombuffer(logprobs.values, dtype="<f8").astype(np.float64)
