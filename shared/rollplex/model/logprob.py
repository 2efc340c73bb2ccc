"""The one definition of log-probability: rollout, reference and trainer all use this module.

    logprob(token) = log_softmax(logits / temperature)[token], over the ids of the vocabulary that may be sampled

Ids in `never_sampled` and rows that pad the vocabulary are left out of the softmax; top-k and top-p come later and do
not change it. Entropy is that of the same distribution, -sum p log p.

Does not know: the model beside the output layer, responses, losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rollplex.memory.predict import LOGITS_CHUNK_BYTES
from rollplex.model.attention import softmax_dtype
from rollplex.model.head import output_logits
from rollplex.model.measure import note_scratch
from rollplex.model.parallel.vocabulary import VocabularyShard

LEFT_OUT = -1e20
"""Logit of an id left out, where the result is multiplied by its probability: exp gives exactly 0, and 0 times it, or
times it and a gradient, is still 0, which it would not be for -inf."""


@lru_cache(maxsize=64)
def forbidden_ids(never_sampled: tuple[int, ...], vocab: int, device: torch.device) -> Tensor:
    """Those ids of `never_sampled` that lie in the vocabulary, int64, ascending, without repetition."""
    return torch.tensor(sorted({i for i in never_sampled if 0 <= i < vocab}), dtype=torch.int64, device=device)


def log_probabilities(
    logits: Tensor, *, temperature: float, never_sampled: Sequence[int], vocab: int | None = None
) -> Tensor:
    """Log-probabilities of all ids from logits.

    Args:
        logits: [..., V].
        temperature: above 0.
        never_sampled: ids left out.
        vocab: real vocabulary size if V has padded rows.

    Returns:
        float32 (float64 for float64 logits) [..., vocab], -inf at ids left out.
    """
    real = logits if vocab is None else logits[..., :vocab]
    forbidden = forbidden_ids(tuple(never_sampled), real.shape[-1], logits.device)
    wide = real.to(softmax_dtype(real.dtype)) / temperature
    return torch.log_softmax(wide.index_fill_(-1, forbidden, float("-inf")), -1)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    rows: Tensor,
    tokens: Tensor,
    *,
    temperature: float,
    never_sampled: Sequence[int],
    entropy: bool = False,
    chunk_bytes: int = LOGITS_CHUNK_BYTES,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of given tokens from hidden states, without keeping logits for the backward.

    The backward makes the logits again, chunk by chunk:
    d logits = (d logprob (onehot - p) - d entropy p (log p + H)) / T,
    without the second term where the entropy is in no loss.

    Args:
        hidden: [N, H] after the final norm.
        weight: [V, H] of the output layer, padded rows cut off; or the rows of `shard`, padding included.
        rows: int64 [K], for each token the row of `hidden` that predicts it; any order, repeats allowed.
        tokens: int64 [K].
        entropy: also give the entropy of each row of `hidden`.
        chunk_bytes: logits are made for so many rows at a time that one copy in float32 (float64) takes at most this.
        shard: which part of the vocabulary `weight` is. All ranks of its group call this together, with the same hidden
            states and tokens, and get the same results; the gradient of `weight` is the shard's.

    Returns:
        (logprobs [K], entropy [N] or None) in float32 (float64 for float64).
    """
    vocab = weight.shape[0] if shard is None else shard.vocab
    forbidden = forbidden_ids(tuple(never_sampled), vocab, weight.device)
    if shard is not None:
        forbidden = shard.left_out(forbidden)
    width = weight.shape[0] * softmax_dtype(weight.dtype).itemsize
    chunk = max(1, chunk_bytes // width)
    apply: Any = _TokenLogprobs.apply
    logprobs, entropies = apply(hidden, weight, rows, tokens, temperature, forbidden, entropy, chunk, shard)
    return logprobs, entropies if entropy else None


def _scaled(logits: Tensor, temperature: float, forbidden: Tensor) -> Tensor:
    """logits / T in at least float32, in place if they are; `LEFT_OUT` at ids left out."""
    return logits.to(softmax_dtype(logits.dtype)).div_(temperature).index_fill_(-1, forbidden, LEFT_OUT)


class _TokenLogprobs(torch.autograd.Function):
    """See `token_logprobs`. Two tensors of [chunk, V] at a time, forward and backward."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        rows: Tensor,
        tokens: Tensor,
        temperature: float,
        forbidden: Tensor,
        entropy: bool,
        chunk: int,
        shard: VocabularyShard | None,
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        mine = None
        if shard is not None:
            tokens, mine = shard.here(tokens)
        norm = hidden.new_empty(count, dtype=softmax_dtype(weight.dtype))
        entropies = norm.new_empty(count if entropy else 0)
        picked = norm.new_empty(rows.shape[0])
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            logits = _scaled(output_logits(hidden[part], weight), temperature, forbidden)
            norm[part] = torch.logsumexp(logits, -1)
            here, local = _in_chunk(rows, start, chunk, count)
            picked[here] = logits[local, tokens[here]]
            if entropy:
                probs = torch.softmax(logits, -1)
                note_scratch(logits, probs)
                entropies[part] = norm[part] - probs.mul_(logits).sum(-1)
                del probs
            else:
                note_scratch(logits, logits)  # logsumexp makes the exponentials inside
            del logits  # before the next chunk's are made
        if shard is not None and mine is not None:
            picked, norm, entropies = shard.joined(picked.masked_fill_(~mine, 0), norm, entropies)
        ctx.save_for_backward(hidden, weight, rows, tokens, forbidden, norm, entropies, mine)
        ctx.temperature, ctx.chunk, ctx.shard = temperature, chunk, shard
        ctx.set_materialize_grads(False)
        return picked - norm[rows], entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d_logprobs, d_entropies = grads
        if d_logprobs is None and d_entropies is None:
            return (None,) * 9
        hidden, weight, rows, tokens, forbidden, norm, entropies, mine = ctx.saved_tensors
        count = hidden.shape[0]
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        if d_logprobs is None:
            d_logprobs = norm.new_zeros(rows.shape[0])
        per_row = norm.new_zeros(count).index_add_(0, rows, d_logprobs).neg_()[:, None]
        if mine is not None:
            d_logprobs = d_logprobs.masked_fill(~mine, 0)
        for start in range(0, count, ctx.chunk):
            part = slice(start, start + ctx.chunk)
            factor = _scaled(output_logits(hidden[part], weight), ctx.temperature, forbidden).sub_(norm[part, None])
            d_logits = factor.exp()
            note_scratch(factor, d_logits)
            if d_entropies is not None:
                factor.add_(entropies[part, None]).mul_(d_entropies[part, None].neg()).add_(per_row[part])
                d_logits.mul_(factor)
            else:
                d_logits.mul_(per_row[part])
            del factor
            here, local = _in_chunk(rows, start, ctx.chunk, count)
            d_logits.index_put_((local, tokens[here]), d_logprobs[here], accumulate=True)
            d_logits = d_logits.div_(ctx.temperature).to(weight.dtype)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[part])
            if d_weight is not None:
                d_weight.addmm_(d_logits.t(), hidden[part])
            del d_logits
        if d_hidden is not None and ctx.shard is not None:
            ctx.shard.group.add(d_hidden)
        return d_hidden, d_weight, None, None, None, None, None, None, None


def _in_chunk(rows: Tensor, start: int, chunk: int, count: int) -> tuple[Tensor | slice, Tensor]:
    """Which tokens are predicted by rows start..start+chunk, and those rows relative to start."""
    if chunk >= count:
        return slice(None), rows
    here = ((rows >= start) & (rows < start + chunk)).nonzero().squeeze(1)
    return here, rows[here] - start
