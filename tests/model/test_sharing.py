"""Where no gradient is kept, nothing as large as the prefix K or V of every response ever exists, not even as a view.

(What the pass with gradients holds is counted in test_memory.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rollplex.model import attention
from rollplex.model.decode import Decoder
from rollplex.model.prefix import PrefixState, prefix_forward
from rollplex.model.suffix import suffix_forward
from support.operations import Operation, Operations

SAMPLES = 8
PROMPTS = (160, 131)
"""Tokens of each prompt. Long, so that K of all responses (2 * 8 * 160 * 2 * 64 numbers) is larger than any weight and
than whatever else the passes make."""
Attend = Callable[..., Tensor]
Pass = Callable[[Any, Any, PrefixState], Operations]


def score(kit: Any, model: Any, state: PrefixState) -> Operations:
    """The reference's pass over responses."""
    tokens, lengths = kit.responses([4, 2, 5, 1] * (len(PROMPTS) * SAMPLES // 4), 0)
    with torch.no_grad(), Operations() as operations:
        suffix_forward(model, state, tokens, lengths, temperature=1.0, never_sampled=kit.NEVER, entropy=True)
    return operations


def decode(kit: Any, model: Any, state: PrefixState) -> Operations:
    """Three steps of the rollout."""
    tokens, _ = kit.responses([3] * (len(PROMPTS) * SAMPLES), 0)
    with Operations() as operations:
        decoder = Decoder(model, state, SAMPLES, 4)
        decoder.first_logits()
        for step in range(3):
            decoder.step(tokens[:, step])
    return operations


def too_large(run: Pass, kit: Any) -> list[Operation]:
    """Operations of a pass that gave at least as many numbers as K of the prefixes, repeated for every response."""
    store = kit.shared_store("gpu")
    state = prefix_forward(
        store.model, kit.batch([kit.sample([n], seed) for seed, n in enumerate(PROMPTS)]), grad=False
    )
    operations = run(kit, store.model, state)
    assert len(operations.seen) > 50, "the pass was watched"
    return [operation for operation in operations.seen if operation.elements >= SAMPLES * state.keys[0].numel()]


def expanded_view(original: Attend) -> Attend:
    """K and V with a group dimension, without a copy."""

    def attend(query: Tensor, keys: Tensor, values: Tensor, *own: Tensor, **options: Any) -> Tensor:
        samples = query.shape[0] // keys.shape[0]
        keys, values = (t[:, :, None].expand(-1, -1, samples, -1, -1)[:, :, 0] for t in (keys, values))
        return original(query, keys, values, *own, **options)

    return attend


def one_copy_per_response(original: Attend) -> Attend:
    """The replicated computation behind a shared prefix: right numbers, G times the memory."""

    def attend(query: Tensor, keys: Tensor, values: Tensor, *own: Tensor, bias: Tensor, **options: Any) -> Tensor:
        samples = query.shape[0] // keys.shape[0]
        keys, values, bias = (t.repeat_interleave(samples, 0) for t in (keys, values, bias))
        single = [t.transpose(1, 2).flatten(0, 1)[:, :, None] for t in own]
        return original(query, keys, values, *single, bias=bias, **options)

    return attend


@pytest.mark.parametrize("run", [score, decode])
def test_no_tensor_is_as_large_as_the_prefix_keys_of_every_response(kit: Any, run: Pass) -> None:
    assert too_large(run, kit) == []


@pytest.mark.parametrize("planted", [expanded_view, one_copy_per_response])
@pytest.mark.parametrize("run", [score, decode])
def test_prefix_keys_that_are_expanded_inside_the_attention_are_seen(
    kit: Any, monkeypatch: pytest.MonkeyPatch, run: Pass, planted: Callable[[Attend], Attend]
) -> None:
    monkeypatch.setattr(attention, "attend_prefix_and_own", planted(attention.attend_prefix_and_own))
    assert too_large(run, kit)
