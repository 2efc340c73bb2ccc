"""Batched decoding against a shared prefix.

Owns: the K/V cache of the sampled tokens and the step that fills it. Does not know: how tokens are drawn, stop ids,
groups that have finished (their rows go on and are ignored).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollplex.model.attention import NO_MASK, DecodeContext, attention_bias, softmax_dtype
from rollplex.model.build import Model
from rollplex.model.prefix import PrefixState


class Decoder:
    """Decodes B*G rows, prompt-major, from one prefix state of B rows. No gradients.

    Use: `first_logits()`, then `step(tokens)` with the tokens drawn from the logits before, at most
    `max_new_tokens - 1` times.
    """

    def __init__(self, model: Model, prefix: PrefixState, samples: int, max_new_tokens: int) -> None:
        """prefix: from `prefix_forward(..., grad=False)`. samples: G. max_new_tokens: at least 1."""
        self._model = model
        self._prefix = prefix
        self._samples = samples
        self._steps = max_new_tokens - 1
        prompts, kv, length, dim = prefix.keys[0].shape
        shape = (prompts, kv, samples, self._steps, dim)
        self._context = DecodeContext(
            keys=prefix.keys,
            values=prefix.values,
            own_keys=[key.new_empty(shape) for key in prefix.keys],
            own_values=[value.new_empty(shape) for value in prefix.values],
            bias=attention_bias(
                prefix.lengths, length, self._steps, causal=False, dtype=softmax_dtype(prefix.keys[0].dtype)
            ),
        )
        self._next_position = prefix.next_positions.repeat_interleave(samples)

    @property
    def rows(self) -> int:
        return self._prefix.rows * self._samples

    @property
    def kv_bytes(self) -> int:
        """Of the prefix state and the cache together: what a rollout holds for these prompts."""
        own = (*self._context.own_keys, *self._context.own_values)
        return self._prefix.size_bytes + sum(t.numel() * t.element_size() for t in own)

    @torch.no_grad()
    def first_logits(self) -> Tensor:
        """Logits [B*G, V] of response token 0; the output layer runs once per prompt."""
        logits: Tensor = self._model.lm_head(self._prefix.last_hidden)
        return logits.repeat_interleave(self._samples, 0)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Feeds one token per row, int64 [B*G]; returns the logits [B*G, V] of the next one."""
        context = self._context
        if context.step >= self._steps:
            raise AssertionError(f"step {context.step + 1} of a decoder made for {self._steps}")
        language_model = self._model.model.language_model
        position = (self._next_position + context.step)[None, :, None]
        hidden: Tensor = language_model(
            inputs_embeds=language_model.embed_tokens(tokens[:, None]),
            attention_mask=NO_MASK,
            position_ids=position.expand(3, -1, -1),
            use_cache=False,
            rollplex=context,
        ).last_hidden_state
        context.step += 1
        logits: Tensor = self._model.lm_head(hidden[:, 0])
        return logits
