"""The attention functions that the prefix, suffix and decode passes register with transformers.

Owns: what a query may attend to in each pass, and the keys and values that cross between them. transformers' own
modules do everything else (projections, rope, MLP, norms). Does not know: prompts, responses as text, losses, segments.

A pass hands its context to `language_model(..., rollplex=context)`; transformers passes unknown keyword arguments on to
the attention function. No cache object of transformers is used: `DynamicCache` would copy the prefix once per response.

    name      shape                     meaning
    B         prompts                   rows of the prefix
    G         samples per prompt        rows of the suffix are B*G, prompt-major
    h, kv, g  query heads, K/V heads, h = kv * g
    P, R, D   prefix keys, suffix keys, head dimension
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

TEXT_ATTENTION = "rollplex"
NO_MASK: dict[str, None] = {"full_attention": None}
"""Passed as attention_mask: transformers takes a dict as ready-made masks and builds none of its own."""


class AttentionContext(Protocol):
    """One pass. `attend` gets q [rows, h, R, D], k and v [rows, kv, R, D] after rope; returns [rows, R, h, D]."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor: ...


def softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precisions, else the dtype itself (fp64 stays fp64)."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def kernel_for(query: Tensor) -> AbstractContextManager[object]:
    """In half precision on a GPU flash attention or an error: what else torch might take writes all weights down, as no
    lease foresees, or is not deterministic."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if query.is_cuda and half else nullcontext()


@dataclass(kw_only=True)
class PrefixContext:
    """Causal self-attention over right-padded prompts; keeps K (after rope) and V of each layer, [B, kv, P, D].

    No padding mask: a real query comes before every padded key. With `graph` the kept tensors belong to the autograd
    graph, otherwise they are contiguous copies: in `into` (keys, values by layer) if it is given, else of their own.
    With `again` a layer may come a second time, in its backward (`rollplex.model.layers`); nothing is kept then.
    """

    graph: bool
    again: bool = False
    into: tuple[list[Tensor], list[Tensor]] | None = None
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if layer != len(self.keys) and not (self.again and layer < len(self.keys)):
            raise AssertionError(f"layer {layer} came when layer {len(self.keys)} was due")
        if layer < len(self.keys):
            pass
        elif self.into is not None:
            self.keys.append(self.into[0][layer].copy_(key))
            self.values.append(self.into[1][layer].copy_(value))
        else:
            if not self.graph:
                key, value = key.contiguous(), value.contiguous()
            self.keys.append(key)
            self.values.append(value)
        grouped = query.shape[1] != key.shape[1]
        with kernel_for(query):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        return out.transpose(1, 2)


@dataclass(kw_only=True)
class SuffixContext:
    """Response tokens attend to their prompt's keys and to the tokens before them in their own response.

    keys, values: per layer [B, kv, P, D]. bias: see `attention_bias`.
    """

    keys: list[Tensor]
    values: list[Tensor]
    bias: Tensor | None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        prompts = self.keys[layer].shape[0]
        return attend_prefix_and_own(
            query,
            self.keys[layer],
            self.values[layer],
            _by_prompt(key, prompts),
            _by_prompt(value, prompts),
            bias=self.bias,
            scaling=scaling,
        )


@dataclass(kw_only=True)
class DecodeContext:
    """One new token per row; its K and V go into preallocated caches [B, kv, G, T, D] at index `step`. No gradients."""

    keys: list[Tensor]
    values: list[Tensor]
    own_keys: list[Tensor]
    own_values: list[Tensor]
    bias: Tensor | None
    step: int = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        prompts, end = self.keys[layer].shape[0], self.step + 1
        own_keys, own_values = self.own_keys[layer], self.own_values[layer]
        own_keys[:, :, :, self.step : end] = _by_prompt(key, prompts)
        own_values[:, :, :, self.step : end] = _by_prompt(value, prompts)
        return attend_prefix_and_own(
            query,
            self.keys[layer],
            self.values[layer],
            own_keys[:, :, :, :end],
            own_values[:, :, :, :end],
            bias=None if self.bias is None else self.bias[..., : self.keys[layer].shape[2] + end],
            scaling=scaling,
        )


def attend_prefix_and_own(
    query: Tensor,
    prefix_keys: Tensor,
    prefix_values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    *,
    bias: Tensor | None,
    scaling: float,
) -> Tensor:
    """Attention over the prompt's keys and the response's own, with one softmax over both.

    Args:
        query: [B*G, h, Q, D].
        prefix_keys, prefix_values: [B, kv, P, D], shared by the G responses and by the g query heads of a K/V head.
        own_keys, own_values: [B, kv, G, R, D].
        bias: added to the scores, broadcast to [B, kv, G, g, Q, P + R]; None if everything is visible.
        scaling: 1 / sqrt(D).

    Returns:
        [B*G, Q, h, D].
    """
    rows, heads, new, dim = query.shape
    prompts, kv, prefix, _ = prefix_keys.shape
    samples, group = rows // prompts, heads // kv
    grouped = query.view(prompts, samples, kv, group, new, dim).permute(0, 2, 1, 3, 4, 5)
    # Contiguous, so that both products below read, and save, this one copy.
    grouped = (grouped * scaling).reshape(prompts, kv, samples * group * new, dim).contiguous()
    own_query = grouped.view(prompts, kv, samples, group * new, dim)
    to_prefix = torch.matmul(grouped, prefix_keys.transpose(-1, -2))
    to_own = torch.matmul(own_query, own_keys.transpose(-1, -2))
    scores = torch.cat(
        [to_prefix.view(prompts, kv, samples, group, new, prefix), to_own.view(prompts, kv, samples, group, new, -1)],
        -1,
    )
    if bias is not None:
        scores = scores.add_(bias)
    weights = torch.softmax(scores, -1, dtype=softmax_dtype(query.dtype)).to(query.dtype)
    on_prefix = weights[..., :prefix].reshape(prompts, kv, samples * group * new, prefix)
    on_own = weights[..., prefix:].reshape(prompts, kv, samples, group * new, -1)
    out = torch.matmul(on_prefix, prefix_values).view(prompts, kv, samples, group, new, dim)
    out = out + torch.matmul(on_own, own_values).view(prompts, kv, samples, group, new, dim)
    return out.permute(0, 2, 4, 1, 3, 5).reshape(rows, new, heads, dim)


def attention_bias(lengths: Tensor, prefix: int, own: int, *, causal: bool, dtype: torch.dtype) -> Tensor | None:
    """0 where a response token may look, -inf where not.

    Args:
        lengths: int64 [B], real tokens of each prompt; keys from `lengths[b]` to `prefix` are padding.
        prefix: P. own: R.
        causal: query t of R sees own keys 0..t; otherwise there is one query that sees all R.

    Returns:
        [B or 1, 1, 1, 1, R or 1, P + R], or None if nothing is hidden.
    """
    padded = bool((lengths < prefix).any())
    if not padded and not (causal and own > 1):
        return None
    queries = own if causal else 1
    device = lengths.device
    hidden = torch.zeros(len(lengths) if padded else 1, queries, prefix + own, dtype=torch.bool, device=device)
    if padded:
        hidden[:, :, :prefix] = torch.arange(prefix, device=device) >= lengths[:, None, None]
    if causal:
        hidden[:, :, prefix:] = torch.ones(own, own, dtype=torch.bool, device=device).triu(1)
    bias = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    return bias[:, None, None, None]


def _by_prompt(tensor: Tensor, prompts: int) -> Tensor:
    """[B*G, kv, R, D] -> [B, kv, G, R, D]."""
    return tensor.view(prompts, -1, *tensor.shape[1:]).transpose(1, 2)


def text_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - transformers passes it by position; ours is in the context
    *,
    scaling: float,
    rollplex: AttentionContext | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for each layer of the language model."""
    if rollplex is None:
        raise AssertionError("the language model was called without a rollplex context: use prefix, suffix or decode")
    layer: int = module.layer_idx  # type: ignore[assignment]
    return rollplex.attend(layer, query, key, value, scaling), None


ALL_ATTENTION_FUNCTIONS.register(TEXT_ATTENTION, text_attention)
