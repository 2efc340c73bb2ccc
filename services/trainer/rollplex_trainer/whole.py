"""Whole sequences through the plain model: forward, loss and backward of one response at a time.

Owns: walking through the responses so that one graph is alive at a time, which the losses allow because they are sums
over sequences. Does not know: segments' lifetimes, the stages of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor, autograd

from rollplex.memory.segment import Mapping
from rollplex.memory.tensors import tensor
from rollplex.model.attention import softmax_dtype
from rollplex.model.batch import prompt_batch
from rollplex.model.measure import GraphMeter
from rollplex.model.whole import whole_forward
from rollplex.protocol.common import PromptSlot
from rollplex.protocol.trainer import TrainWhole
from rollplex_trainer.loaded import LoadedTrainer
from rollplex_trainer.losses import LossParts, unit_loss
from rollplex_trainer.metrics import StepMetrics
from rollplex_trainer.unit import SuffixUnit


def train_whole(
    ready: LoadedTrainer, message: TrainWhole, unit: SuffixUnit, inputs: Mapping, metrics: StepMetrics
) -> tuple[Tensor, int]:
    """Add the gradients of all responses to the arena, in order of group and sample, and the unit to the metrics.

    Args:
        inputs: the step's inputs segment; nothing looks at it when this returns.

    Returns:
        Log-probabilities [rows, R], 0 at padding, without a graph; and the most bytes that one graph held.
    """
    device = unit.tokens.device
    mask = torch.arange(unit.tokens.shape[1], device=device) < unit.lengths[:, None]
    logprobs = torch.zeros(mask.shape, dtype=softmax_dtype(ready.plain_model.dtype), device=device)
    entropies, held_bytes = torch.zeros_like(logprobs), 0
    slots = [slot for slot, r in zip(message.prompts, message.responses, strict=True) for _ in r.lengths]
    for row, (slot, length) in enumerate(zip(slots, unit.lengths.tolist(), strict=True)):
        part = (slice(row, row + 1), slice(0, length))
        with GraphMeter() as meter:
            one, spread = _forward(ready, inputs, slot, unit.tokens[row, :length])
        held_bytes = max(held_bytes, meter.held_bytes((one, spread), excluding=ready.weights.values()))
        autograd.backward(_loss(ready, unit, part, (one[None], spread[None], mask[part])).total)
        logprobs[part], entropies[part] = one.detach()[None], spread.detach()[None]
    everything = (slice(None), slice(None))
    parts = _loss(ready, unit, everything, (logprobs, entropies, mask))
    metrics.add(unit, parts, logprobs, entropies, mask)
    return logprobs, held_bytes


def _forward(ready: LoadedTrainer, inputs: Mapping, slot: PromptSlot, response: Tensor) -> tuple[Tensor, Tensor]:
    prompt = prompt_batch(
        lambda at, shape, dtype: tensor(inputs, at, shape, dtype), [slot], ready.shape.row_width, device=response.device
    )
    return whole_forward(
        ready.plain_model,
        prompt,
        response,
        temperature=ready.algorithm.temperature,
        never_sampled=ready.never_sampled,
    )


def _loss(
    ready: LoadedTrainer, unit: SuffixUnit, part: tuple[slice, slice], values: tuple[Tensor, Tensor, Tensor]
) -> LossParts:
    """Of a part of the unit's rows and tokens. values: its log-probabilities, entropies and mask."""
    logprobs, entropy, mask = values
    return unit_loss(
        ready.algorithm,
        logprobs=logprobs,
        old=logprobs.detach(),
        reference=None if unit.reference is None else unit.reference[part].to(logprobs.dtype),
        entropy=entropy,
        mask=mask,
        advantages=unit.advantages[part[0]],
        weights=unit.weights[part[0]],
    )
