"""What the units of a step ask the ledger for: exact sizes, owners, lifetimes.

Owns: which blocks a unit has, who holds them from when to when, and of which reservation. Sizes come from `formulas`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollplex.journal.phases import Phase
from rollplex.memory.predict import Grid
from rollplex.protocol.common import Kind, PromptSlot, Responses, Role
from rollplex.protocol.prefix import Which
from rollplex.protocol.rollout import Sampling
from rollplex_coordinator.memory.blocks import Want
from rollplex_coordinator.memory.formulas import Formulas
from rollplex_coordinator.memory.names import PREFIX_BACKWARD, ROLLOUT_KV, SCORE_WORKSPACE, TRAIN_WORKSPACE


@dataclass(frozen=True, kw_only=True)
class UnitWants:
    """The blocks of units, by the prompts and responses in them."""

    passes: Formulas
    """Of what prefix and trainer have of the model."""
    engine: Formulas
    """Of what an engine has of it."""
    copies: int
    """Of each prompt."""

    def rollout_kv(self, prompts: Sequence[PromptSlot], sampling: Sampling, unit: int) -> Want:
        """K/V of one decode unit, training or evaluation."""
        size_bytes = self.engine.rollout_kv(
            prompts=len(prompts),
            tokens=_longest(prompts),
            samples=sampling.group_size,
            longest=sampling.longest_response,
        )
        phase = Phase.ROLLOUT if sampling.temperature > 0 else Phase.EVAL
        return _rollout_kv(size_bytes, phase, f"K/V of decode unit {unit}")

    def starting_pool(self) -> Want:
        """The pool that an engine comes up with, and gives back when it is loaded."""
        size_bytes = self.engine.rollout_kv(prompts=0, tokens=0, samples=0, longest=0)
        return _rollout_kv(size_bytes, Phase.LOAD, "K/V of the engine while it starts")

    def prefix_unit(self, which: Which, prompts: Sequence[PromptSlot], unit: int) -> tuple[Want, ...]:
        """What one prefix unit holds from its forward on: private memory first, if it needs any, then the actor's
        segment."""
        rows, tokens = len(prompts) * self.copies, _longest(prompts)
        if which is Which.REFERENCE:
            size = self.passes.reference_kv(rows, tokens)
            return (_prefix(Kind.REFERENCE_PREFIX_KV, size, Phase.SCORE, f"reference K/V of prefix unit {unit}"),)
        segment = Want(
            kind=Kind.ACTOR_PREFIX_KV,
            size_bytes=self.passes.actor_segment(rows, tokens),
            owner=Role.PREFIX,
            last_consumer=Role.TRAINER,
            first=Phase.ROLLOUT,
            last=Phase.TRAIN,
            purpose=f"actor K/V and gradients of prefix unit {unit}",
            segment=True,
        )
        if self.passes.recomputes:
            return (segment,)
        size = self._activations(prompts)
        return (_prefix(Kind.PREFIX_ACTIVATIONS, size, Phase.TRAIN, f"activations of prefix unit {unit}"), segment)

    def backward_workspace(self, prompts: Sequence[PromptSlot], unit: int) -> Want | None:
        """Of a prefix unit's backward, which makes again what was not kept; None if everything was."""
        if not self.passes.recomputes:
            return None
        return Want(
            kind=Kind.WORKSPACE,
            size_bytes=self._activations(prompts),
            owner=Role.PREFIX,
            last_consumer=Role.PREFIX,
            first=self._scoring,
            last=Phase.TRAIN,
            purpose=f"backward of prefix unit {unit}",
            reservation=PREFIX_BACKWARD,
        )

    def score_workspace(self, responses: Sequence[Responses], unit: int) -> Want:
        """Scratch of one reference scoring."""
        return Want(
            kind=Kind.WORKSPACE,
            size_bytes=self._logits(responses),
            owner=Role.PREFIX,
            last_consumer=Role.PREFIX,
            first=self._scoring,
            last=Phase.SCORE,
            purpose=f"scoring of suffix unit {unit}",
            reservation=SCORE_WORKSPACE,
        )

    def train_workspace(
        self, prompts: Sequence[PromptSlot], responses: Sequence[Responses], unit: int
    ) -> tuple[Want, Want]:
        """Of one suffix unit: what its graph holds, and scratch for logits."""
        saved = self.passes.suffix(len(responses) * self.copies, _longest(prompts), _lengths(responses))
        return (
            self._training(saved, f"graph of suffix unit {unit}"),
            self._training(self._logits(responses), f"logits of suffix unit {unit}"),
        )

    def whole_workspace(self, prompt: PromptSlot, responses: Responses) -> tuple[Want, Want]:
        """Of one whole sequence, the group's longest: what its graph holds, and scratch for logits."""
        longest = max(responses.lengths)
        return (
            self._training(self.passes.whole(prompt.tokens + longest, _grids([prompt])), "graph of a whole sequence"),
            self._training(self.passes.whole_logits(longest), "logits of a whole sequence"),
        )

    @property
    def _scoring(self) -> Phase:
        """The first phase in which responses may be scored and trained."""
        return Phase.ROLLOUT if self.passes.config.run.streams else Phase.SCORE

    def _activations(self, prompts: Sequence[PromptSlot]) -> int:
        return self.passes.activations(len(prompts) * self.copies, _longest(prompts), _grids(prompts, self.copies))

    def _logits(self, responses: Sequence[Responses]) -> int:
        return self.passes.logits(len(responses) * self.copies, _lengths(responses))

    def _training(self, size_bytes: int, purpose: str) -> Want:
        return Want(
            kind=Kind.WORKSPACE,
            size_bytes=size_bytes,
            owner=Role.TRAINER,
            last_consumer=Role.TRAINER,
            first=self._scoring,
            last=Phase.TRAIN,
            purpose=purpose,
            reservation=TRAIN_WORKSPACE,
        )


def _rollout_kv(size_bytes: int, phase: Phase, purpose: str) -> Want:
    return Want(
        kind=Kind.ROLLOUT_KV,
        size_bytes=size_bytes,
        owner=Role.ROLLOUT,
        last_consumer=Role.ROLLOUT,
        first=phase,
        last=phase,
        purpose=purpose,
        reservation=ROLLOUT_KV,
    )


def _prefix(kind: Kind, size_bytes: int, last: Phase, purpose: str) -> Want:
    return Want(
        kind=kind,
        size_bytes=size_bytes,
        owner=Role.PREFIX,
        last_consumer=Role.PREFIX,
        first=Phase.ROLLOUT,
        last=last,
        purpose=purpose,
    )


def _longest(prompts: Sequence[PromptSlot]) -> int:
    return max(p.tokens for p in prompts)


def _lengths(responses: Sequence[Responses]) -> list[int]:
    return [length for r in responses for length in r.lengths]


def _grids(prompts: Sequence[PromptSlot], copies: int = 1) -> list[Grid]:
    return [(m.frames, m.height, m.width) for p in prompts for m in p.media for _ in range(copies)]
