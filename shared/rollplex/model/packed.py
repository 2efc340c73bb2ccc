"""The suffix pass without padding: all responses of a unit as one row of tokens.

Owns: where responses lie in that row, and its attention: a token sees its prompt's keys and, before it in its own
response, the response's. The linear layers run over the real tokens only, no weights of the attention are written down,
and the prompt's keys are read in place, once for all its responses. Does not know: kernels (`flash`), the model around
the attention, log-probabilities.

    N tokens     [ response 0 of prompt 0 | response 1 of prompt 0 | ... | response 0 of prompt 1 | ... ]
    own part     causal within each response                               one call
    prefix part  each prompt's tokens see all of the prompt's real keys    one call per prompt, keys [kv, P, D] in place
    merged       with l = log(exp(l_own) + exp(l_prefix)):  out = exp(l_own - l) out_own + exp(l_prefix - l) out_prefix

`rollplex.model.suffix` has the padded pass, which this is held to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rollplex.model import flash
from rollplex.model.attention import softmax_dtype


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where the fed tokens of a unit lie. Responses that feed no token have no place.

    own: the responses. spans: per prompt, first and last + 1 of its tokens. prefix_lengths: per prompt, real keys.
    """

    own: flash.Sequences
    spans: tuple[tuple[int, int], ...]
    prefix_lengths: tuple[int, ...]

    def prompts(self) -> Iterator[tuple[int, slice, int]]:
        """Number, tokens and real keys of each prompt that has tokens."""
        for number, ((start, end), keys) in enumerate(zip(self.spans, self.prefix_lengths, strict=True)):
            if end > start:
                yield number, slice(start, end), keys


def packing(fed: Tensor, prefix_lengths: Tensor) -> Packing:
    """Of a unit.

    Args:
        fed: int64 [B*G], tokens fed of each response, prompt-major; not all 0.
        prefix_lengths: int64 [B].
    """
    counts: list[int]
    keys: list[int]
    counts, keys = fed.tolist(), prefix_lengths.tolist()
    samples = len(counts) // len(keys)
    lengths = tuple(count for count in counts if count)
    ends = [sum(counts[: (number + 1) * samples]) for number in range(len(keys))]
    boundaries = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=fed.device)
    return Packing(
        own=flash.Sequences(boundaries=boundaries, lengths=lengths),
        spans=tuple(zip([0, *ends[:-1]], ends, strict=True)),
        prefix_lengths=tuple(keys),
    )


@dataclass(kw_only=True)
class PackedContext:
    """keys, values: of the prompts, per layer [B, kv, P, D]."""

    keys: list[Tensor]
    values: list[Tensor]
    packing: Packing

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [1, h, N, D], key and value [1, kv, N, D]; returns [1, N, h, D]."""
        q, k, v = (_tokens_first(t) for t in (query, key, value))
        apply: Any = _PackedAttention.apply
        out: Tensor = apply(q, k, v, self.keys[layer], self.values[layer], self.packing, scaling)
        return out[None]


class _PackedAttention(torch.autograd.Function):
    """q [N, h, D], own k and v [N, kv, D], prompts' keys and values [B, kv, P, D] -> [N, h, D]."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, packing: Packing, scaling: float
    ) -> Tensor:
        own, own_lse = flash.many(q, k, v, packing.own, scaling=scaling)
        parts = [
            flash.one(q[at], *_of_prompt(keys, values, number, length), causal=False, scaling=scaling)
            for number, at, length in packing.prompts()
        ]
        out, lse = _merged(own, own_lse, torch.cat([part for part, _ in parts]), torch.cat([x for _, x in parts], 1))
        ctx.save_for_backward(q, k, v, keys, values, out, lse)
        ctx.packing, ctx.scaling = packing, scaling
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (d_out,) = grads
        q, k, v, keys, values, out, lse = ctx.saved_tensors
        packing, scaling = ctx.packing, ctx.scaling
        d_out = d_out.contiguous()
        d_q, d_k, d_v = flash.many_backward(d_out, q, k, v, out, lse, packing.own, scaling=scaling)
        d_keys, d_values = torch.zeros_like(keys), torch.zeros_like(values)
        for number, at, length in packing.prompts():
            k_b, v_b = _of_prompt(keys, values, number, length)
            given = (d_out[at], q[at], k_b, v_b, out[at], lse[:, at])
            more, d_k_b, d_v_b = flash.one_backward(*given, causal=False, scaling=scaling)
            d_q[at] += more
            d_keys[number, :, :length] = d_k_b.transpose(0, 1)
            d_values[number, :, :length] = d_v_b.transpose(0, 1)
        return d_q, d_k, d_v, d_keys, d_values, None, None


def _merged(own: Tensor, own_lse: Tensor, prefix: Tensor, prefix_lse: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over both sets of keys. Outputs [N, h, D]; lse [h, N], never infinite: both sets have a key."""
    share = torch.sigmoid(prefix_lse - own_lse).t()[:, :, None]
    wide = softmax_dtype(own.dtype)
    out = torch.lerp(own.to(wide), prefix.to(wide), share).to(own.dtype)
    return out, torch.logaddexp(own_lse, prefix_lse).contiguous()


def _of_prompt(keys: Tensor, values: Tensor, number: int, length: int) -> tuple[Tensor, Tensor]:
    """Real keys and values of one prompt as [P, kv, D], views."""
    key, value = (t[number, :, :length].transpose(0, 1) for t in (keys, values))
    return key, value


def _tokens_first(heads: Tensor) -> Tensor:
    """[1, heads, N, D] -> [N, heads, D], a view where the last dimension is contiguous."""
    tokens = heads[0].transpose(0, 1)
    return tokens if tokens.stride(-1) == 1 else tokens.contiguous()
