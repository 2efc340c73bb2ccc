"""The suffix pass: log-probabilities of all responses of all prompts, against K/V of the prefix.

Two ways to the same numbers: padded, in products of matrices that run anywhere, and packed (`rollplex.model.packed`),
without padding and without attention weights, where `packs_suffix` says so.

Owns: the suffix forward. Its backward is autograd's own: gradients reach the parameters and, where the prefix state is
made of leaves, K, V and the last hidden state. Does not know: losses, advantages, which process made the prefix.

Response token 0 is predicted by the prompt's last hidden state; tokens 0..R-2 are fed and predict tokens 1..R-1. The
number of layer calls does not depend on the number of responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollplex.errors import EngineError
from rollplex.memory.predict import packs_suffix
from rollplex.model.attention import NO_MASK, AttentionContext, SuffixContext, attention_bias, softmax_dtype
from rollplex.model.build import Model
from rollplex.model.logprob import forbidden_ids, token_logprobs
from rollplex.model.packed import PackedContext, packing
from rollplex.model.parallel.modules import vocabulary_shard
from rollplex.model.prefix import PrefixState


@dataclass(frozen=True, kw_only=True)
class SuffixOutput:
    """Per response token; float32 (float64 if the model is).

    logprobs: [B*G, R], 0 at padding. entropy: [B*G, R] of the same distribution, 0 at padding, or None.
    mask: bool [B*G, R], True at real tokens.
    """

    logprobs: Tensor
    entropy: Tensor | None
    mask: Tensor


def suffix_forward(
    model: Model,
    prefix: PrefixState,
    tokens: Tensor,
    lengths: Tensor,
    *,
    temperature: float,
    never_sampled: Sequence[int],
    entropy: bool = False,
    packed: bool | None = None,
) -> SuffixOutput:
    """Scores responses in one pass. Keeps a graph if gradients are enabled.

    Args:
        model: from `rollplex.model.build`.
        prefix: B rows.
        tokens: int64 [B*G, R], prompt-major, right-padded with any id of the vocabulary.
        lengths: int64 [B*G], at least 1.
        temperature, never_sampled: of the definition in `rollplex.model.logprob`.
        entropy: also give the entropy.
        packed: which way; None: as `rollplex.memory.predict.packs_suffix` says of the prefix state.

    Raises:
        EngineError: a response holds a token that is never sampled, or is empty.
    """
    rows, longest = tokens.shape
    if rows % prefix.rows:
        raise AssertionError(f"{rows} responses do not divide among {prefix.rows} prefix rows")
    mask = torch.arange(longest, device=tokens.device) < lengths[:, None]
    _check_tokens(tokens, lengths, mask, never_sampled)
    if packed is None:
        key = prefix.keys[0]
        packed = packs_suffix(str(key.dtype).removeprefix("torch."), key.shape[-1], cuda=key.is_cuda)
    hidden, flat = _hidden_states(model, prefix, tokens, mask, packed=packed)
    values, entropies = token_logprobs(
        hidden,
        model.lm_head.weight,
        flat,
        tokens[mask],
        temperature=temperature,
        never_sampled=never_sampled,
        entropy=entropy,
        shard=vocabulary_shard(model.lm_head),
    )
    return SuffixOutput(
        logprobs=_padded(values, mask),
        entropy=None if entropies is None else _padded(entropies[flat], mask),
        mask=mask,
    )


def _hidden_states(
    model: Model, prefix: PrefixState, tokens: Tensor, mask: Tensor, *, packed: bool
) -> tuple[Tensor, Tensor]:
    """Hidden states that predict the real tokens [N, hidden], and for each real token (row-major) its row in them."""
    rows, longest = tokens.shape
    samples = rows // prefix.rows
    flat = torch.empty(rows, longest, dtype=torch.int64, device=tokens.device)
    flat[:, 0] = torch.arange(prefix.rows, device=tokens.device).repeat_interleave(samples)
    predicted = mask[:, 1:]
    if not bool(predicted.any()):
        return prefix.last_hidden, flat[mask]
    count = int(predicted.sum())
    flat[:, 1:][predicted] = torch.arange(prefix.rows, prefix.rows + count, device=tokens.device)
    if packed:
        return torch.cat([prefix.last_hidden, _packed_hidden(model, prefix, tokens[:, :-1], predicted)]), flat[mask]
    hidden = _suffix_hidden(model, prefix, tokens[:, :-1])
    chosen = hidden.flatten(0, 1) if count == predicted.numel() else hidden[predicted]
    return torch.cat([prefix.last_hidden, chosen]), flat[mask]


def _suffix_hidden(model: Model, prefix: PrefixState, tokens: Tensor) -> Tensor:
    """Hidden states after the final norm, [B*G, R, hidden], of fed response tokens [B*G, R]."""
    dtype = softmax_dtype(prefix.last_hidden.dtype)
    bias = attention_bias(prefix.lengths, prefix.keys[0].shape[2], tokens.shape[1], causal=True, dtype=dtype)
    context = SuffixContext(keys=prefix.keys, values=prefix.values, bias=bias)
    return _run(model, tokens, _positions(prefix, tokens), context)


def _packed_hidden(model: Model, prefix: PrefixState, tokens: Tensor, fed: Tensor) -> Tensor:
    """Hidden states after the final norm, [N, hidden], of those of the tokens [B*G, R] that are `fed`, row by row."""
    context = PackedContext(keys=prefix.keys, values=prefix.values, packing=packing(fed.sum(1), prefix.lengths))
    return _run(model, tokens[fed][None], _positions(prefix, tokens)[fed][None], context)[0]


def _positions(prefix: PrefixState, tokens: Tensor) -> Tensor:
    """int64 [B*G, R]: in all three rows."""
    start = prefix.next_positions.repeat_interleave(tokens.shape[0] // prefix.rows)
    return start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)


def _run(model: Model, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
    """Tokens and positions [rows, R] -> [rows, R, hidden]."""
    language_model = model.model.language_model
    hidden: Tensor = language_model(
        inputs_embeds=language_model.embed_tokens(tokens),
        attention_mask=NO_MASK,
        position_ids=positions.expand(3, -1, -1),
        use_cache=False,
        rollplex=context,
    ).last_hidden_state
    return hidden


def _padded(values: Tensor, mask: Tensor) -> Tensor:
    """[number of real tokens] -> [B*G, R] with 0 at padding."""
    if values.numel() == mask.numel():
        return values.view(mask.shape)
    index = mask.flatten().nonzero().squeeze(1)
    return values.new_zeros(mask.numel()).index_copy(0, index, values).view(mask.shape)


def _check_tokens(tokens: Tensor, lengths: Tensor, mask: Tensor, never_sampled: Sequence[int]) -> None:
    if bool((lengths < 1).any()):
        raise EngineError("a response is empty", needed="at least one token per response")
    forbidden = forbidden_ids(tuple(never_sampled), 2**62, tokens.device)
    bad = torch.isin(tokens, forbidden) & mask
    if bool(bad.any()):
        raise EngineError(
            "a response holds a token that is never sampled",
            got=f"token {int(tokens[bad][0])}",
            needed="ids outside never_sampled, so that their log-probability is finite",
        )
