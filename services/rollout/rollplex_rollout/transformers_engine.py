"""The engine where SGLang is not to be had, or not wanted: transformers' own modules over the mapped weights.

Owns the order of a unit's work: prefill once per prompt, then one decode step after another for all rows at once. Does
not know the weights header, messages, or what becomes of a group.

The unit's batch never changes: all prompts in one prefill, all rows in every decode step. Rows that have stopped keep
their place, are fed what they drew, and their results are dropped (`transcript`): the number of steps is the only thing
that tokens decide.

Of several tensor-parallel ranks each has its own shards and K/V heads; logits are gathered, so that all of them draw
the same tokens from the same bits.

On a GPU the model computes there, and tokens are drawn from its logits on the host, by the same arithmetic: running
sums of a GPU have no fixed order. No fast engine, but one for float32 weights too, with one rule of drawing everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.parts import rollout_parts
from rollplex.layout.parallel.rank import rank_shape
from rollplex.memory.predict import rollout_kv_bytes
from rollplex.memory.segment import Mapping
from rollplex.memory.tensors import DTYPES, require_mapped, tensor, views
from rollplex.model.batch import PromptBatch, prompt_batch
from rollplex.model.build import Model, build
from rollplex.model.decode import Decoder
from rollplex.model.device import HOST, limit_private, private_memory, torch_device, trim
from rollplex.model.logprob import log_probabilities
from rollplex.model.parallel.build import build_parallel
from rollplex.model.parallel.group import meet
from rollplex.model.parallel.views import shard_views
from rollplex.model.prefix import prefix_forward
from rollplex.model.setup import prepare_torch
from rollplex_rollout.engine import Announce, Setup, Unit, UnitReport, nobody
from rollplex_rollout.philox import Draws
from rollplex_rollout.sampling import Rule, draw, exclusion
from rollplex_rollout.transcript import Transcript


class TransformersEngine:
    """Samples from the mapped weights themselves (`rollplex_rollout.engine.Engine`)."""

    def __init__(self, setup: Setup) -> None:
        """Build the model over the segment; no weight is copied.

        Raises:
            ModelError: the folder's architecture cannot be built over the table.
            EngineError: no id of the vocabulary may be sampled; or torch sees no GPU where one is wanted.
        """
        self._device = prepare_torch(setup.spec)
        self._private_bytes = setup.engine.private_bytes
        limit_private(self._device, self._private_bytes)
        self._setup = setup
        self._shape = rank_shape(setup.shape, RolloutLayout(degree=setup.parallel.rollout))
        self._dtype = setup.spec.dtype
        self._never_sampled = setup.spec.never_sampled
        self._excluded = exclusion(setup.spec.never_sampled, setup.shape.vocab)
        self._model = _whole(setup) if setup.parallel.rollout == 1 else _of_rank(setup)
        self._tower_calls = 0
        self._model.model.visual.register_forward_pre_hook(self._count_tower)

    @property
    def on_policy(self) -> bool:
        return True

    @property
    def actor(self) -> Mapping:
        return self._setup.actor

    def digest(self) -> str:
        return self._setup.digest()

    def check_mapped(self) -> None:
        require_mapped(self._setup.actor, dict(self._model.named_parameters()))

    def kv_bytes(self, unit: Unit) -> int:
        return rollout_kv_bytes(
            self._shape,
            rows=len(unit.prompts),
            tokens=max(slot.tokens for slot in unit.prompts),
            samples=unit.sampling.group_size,
            max_new_tokens=unit.longest,
            dtype=self._dtype,
        )

    def generate(self, unit: Unit, announce: Announce, prefilled: Callable[[], None] = nobody) -> UnitReport:
        unit.check()
        private = private_memory(
            f"a decode unit of step {unit.step}", asked_bytes=self.kv_bytes(unit), cap_bytes=self._private_bytes
        )
        try:
            with private:
                return self._sampled(unit, announce, prefilled)
        finally:
            trim(self._device)  # the unit's lease ends

    def _sampled(self, unit: Unit, announce: Announce, prefilled: Callable[[], None]) -> UnitReport:
        sampling = unit.sampling
        start_s, calls = time.monotonic(), self._tower_calls
        batch = self._batch(unit)
        state = prefix_forward(self._model, batch, grad=False)
        decoder = Decoder(self._model, state, sampling.group_size, unit.longest)
        logits = decoder.first_logits().to(HOST)
        prefill_end_s = time.monotonic()
        prefilled()
        transcript, draws, steps = Transcript(unit), _draws(unit), 0
        rule = Rule(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, excluded=self._excluded
        )
        while True:
            tokens = draw(logits, torch.from_numpy(draws.at(transcript.position)), rule)
            logprobs = self._logprobs(logits, tokens, sampling.temperature)
            for group in transcript.add(tokens.numpy(), logprobs.numpy()):
                announce(group)
            if transcript.done:
                break
            logits = decoder.step(tokens.to(self._device)).to(HOST)
            steps += 1
        return UnitReport(
            start_s=start_s,
            prefill_end_s=prefill_end_s,
            end_s=time.monotonic(),
            decode_steps=steps,
            vision_prompts=batch.vision_prompts * (self._tower_calls - calls),
            kv_bytes=decoder.kv_bytes,
        )

    def drop_caches(self) -> None:
        """Nothing to drop: K/V live inside `generate`, and what outlives it depends on shapes alone."""

    def close(self) -> None:
        del self._model

    def _batch(self, unit: Unit) -> PromptBatch:
        return prompt_batch(
            lambda offset, shape, dtype: tensor(unit.inputs, offset, shape, dtype),
            unit.prompts,
            self._setup.shape.row_width,
            device=self._device,
        )

    def _logprobs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        """float64 [rows], of the drawn tokens, by the one definition; of temperature 1 for greedy."""
        everything = log_probabilities(logits, temperature=temperature or 1.0, never_sampled=self._never_sampled)
        return everything.gather(-1, tokens[:, None]).squeeze(-1).double()

    def _count_tower(self, *_: Any) -> None:
        self._tower_calls += 1


def _whole(setup: Setup) -> Model:
    """Over a segment that has all of the model, as the table says, whatever the degree of training is."""
    weights = views(setup.actor, setup.table)
    folder, frozen = Path(setup.spec.path), setup.spec.freeze_vision
    return build(folder, setup.table, weights, gradients=None, freeze_vision=frozen)


def _of_rank(setup: Setup) -> Model:
    """Of one of several ranks, which meets the others: over its rollout shards in the segment of its device.

    With more ranks than K/V heads several have the same head, each with query heads of its own.
    """
    assert setup.device is not None, "several ranks have a plan"
    layout = TrainingLayout(degree=setup.parallel.rollout)
    parts = {part.name: part for part in rollout_parts(setup.device)}
    numbers = setup.weight_bytes // setup.table.item_bytes
    weights = shard_views(tensor(setup.actor, 0, (numbers,), DTYPES[setup.table.dtype]), parts.values())
    group = meet(setup.parallel, layout.degree, torch_device(setup.spec.device)).tensor
    folder = Path(setup.spec.path)
    return build_parallel(folder, setup.shape, layout, parts, weights, gradients=None, group=group)


def _draws(unit: Unit) -> Draws:
    sampling = unit.sampling
    return Draws(
        seed=sampling.seed,
        purpose=sampling.purpose,
        step=unit.step,
        prompts=[slot.row for slot in unit.prompts for _ in range(sampling.group_size)],
        samples=list(range(sampling.group_size)) * len(unit.prompts),
    )
