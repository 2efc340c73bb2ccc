"""A suffix unit through the model: forward, loss and backward against the K/V that a prefix unit left in its segment.

Owns: that walk. Does not know: stages of a step, headers, segments' lifetimes.
"""

from __future__ import annotations

import torch
from torch import Tensor, autograd

from rollplex.layout.kv import KvLayout
from rollplex.memory.segment import Mapping
from rollplex.memory.tensors import KvViews, kv_views
from rollplex.model.measure import GraphMeter
from rollplex.model.prefix import PrefixState, leaf_state
from rollplex.model.suffix import suffix_forward
from rollplex.protocol.trainer import TrainSuffix
from rollplex_trainer.losses import unit_loss
from rollplex_trainer.metrics import StepMetrics
from rollplex_trainer.ready import ReadyTrainer
from rollplex_trainer.unit import SuffixUnit


def train_suffix(
    ready: ReadyTrainer, message: TrainSuffix, unit: SuffixUnit, mapping: Mapping, metrics: StepMetrics
) -> tuple[Tensor, int]:
    """Add the unit's gradients to the arena and to its segment, and the unit to the metrics.

    Args:
        mapping: of the unit's K/V; no view of it is left when this returns.

    Returns:
        Log-probabilities [rows, R], without a graph; and the bytes that the graph held.
    """
    kv = _kv(ready, message, mapping)
    if message.first:
        kv.gradients.zero_()
    prefix = _leaves(message, unit, kv)
    with GraphMeter() as meter:
        out = suffix_forward(
            ready.model,
            prefix,
            unit.tokens,
            unit.lengths,
            temperature=ready.algorithm.temperature,
            never_sampled=ready.never_sampled,
            entropy=True,
        )
    assert out.entropy is not None, "asked for"
    outside = (*ready.weights.values(), *prefix.keys, *prefix.values, prefix.last_hidden)
    held_bytes = meter.held_bytes((out.logprobs, out.entropy), excluding=outside)
    parts = unit_loss(
        ready.algorithm,
        logprobs=out.logprobs,
        old=out.logprobs.detach(),
        reference=None if unit.reference is None else unit.reference.to(out.logprobs.dtype),
        entropy=out.entropy,
        mask=out.mask,
        advantages=unit.advantages,
        weights=unit.weights,
    )
    autograd.backward(parts.total)
    metrics.add(unit, parts, out.logprobs, out.entropy, out.mask)
    return out.logprobs.detach(), held_bytes


def _kv(ready: ReadyTrainer, message: TrainSuffix, mapping: Mapping) -> KvViews:
    rows = len(message.prompts) * message.copies
    longest = max(prompt.tokens for prompt in message.prompts)
    return kv_views(mapping, KvLayout(ready.kv_shape, rows, longest, ready.table.dtype))


def _leaves(message: TrainSuffix, unit: SuffixUnit, kv: KvViews) -> PrefixState:
    device = unit.tokens.device
    lengths = torch.tensor([prompt.tokens for prompt in message.prompts], device=device)
    positions = torch.tensor([prompt.next_position for prompt in message.prompts], device=device)
    return leaf_state(
        kv,
        lengths.repeat_interleave(message.copies),
        positions.repeat_interleave(message.copies),
        unit.prefix_rows,
    )
