"""From a row of logits and a uniform number to a token.

Owns the sampling rule. Knows no random numbers (`philox`), no model and no batch; the reported log-probability is
defined elsewhere (`rollplex.model.logprob`) and does not depend on top-k or top-p.

The rule, per row, in fp64:

1. weight of id i = exp((logit_i - max) / temperature); 0 if i is never sampled.
2. top-k, then top-p on what top-k left. Ids are ordered by falling weight and, where weights are equal, by rising id.
   top-k keeps the first k. top-p keeps the shortest beginning of that order whose weights reach `top_p` of the sum.
   At least one id stays. (The order of the two is that of transformers and vLLM.)
3. token = the first id, in id order, at which the running sum of the kept weights exceeds u × their sum, u in [0, 1).
   The sum is the running sum's own last value, so the token always exists and always has a weight above 0.

Temperature 0 is greedy: the greatest logit, of equal ones the lowest id; u, top-k and top-p play no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollplex.errors import EngineError
from rollplex_rollout.engine import diverged


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How tokens are drawn; `excluded` is bool [vocab], true where an id is never sampled."""

    temperature: float
    top_p: float
    top_k: int
    """0 is off."""
    excluded: Tensor


def exclusion(never_sampled: Sequence[int], vocab: int) -> Tensor:
    """Bool [vocab], true at the ids that are never sampled; ids outside the vocabulary play no part.

    Raises:
        EngineError: none is left to sample.
    """
    mask = torch.zeros(vocab, dtype=torch.bool)
    for token in never_sampled:
        if 0 <= token < vocab:
            mask[token] = True
    if bool(mask.all()):
        raise EngineError("No id is left to sample", got=f"{vocab} of {vocab} ids never sampled")
    return mask


def draw(logits: Tensor, uniforms: Tensor, rule: Rule) -> Tensor:
    """Draw one token per row.

    Args:
        logits: [rows, vocab], any floating dtype, on the host.
        uniforms: float64 [rows] in [0, 1).

    Returns:
        int64 [rows].

    Raises:
        DivergedError: a row has a NaN or +inf, or no id with a finite logit.
    """
    masked = logits.double().masked_fill(rule.excluded, -torch.inf)
    greatest, greedy = masked.max(dim=-1, keepdim=True)
    if not bool(greatest.isfinite().all()):  # a NaN or +inf anywhere in the row is its maximum
        bad = (~greatest.isfinite()).nonzero()[:8, 0].tolist()
        raise diverged(f"samples {bad} of a batch (at most 8 are named)")
    if rule.temperature == 0.0:
        return greedy.squeeze(-1)
    weights = ((masked - greatest) / rule.temperature).exp()
    return inverse_cdf(keep_top(weights, top_k=rule.top_k, top_p=rule.top_p), uniforms)


def keep_top(weights: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """Set the weights to 0 that top-k and then top-p leave out (rule 2 above).

    Args:
        weights: float64 [rows, vocab], not negative, not normalised.
        top_k: 0 is off.
        top_p: in (0, 1]; 1 is off.
    """
    vocab = weights.shape[-1]
    top_k = min(top_k, vocab) if top_k else vocab
    if top_k == vocab and top_p >= 1.0:
        return weights
    ordered = _falling(weights)[:, :top_k]
    running = ordered.cumsum(dim=-1)
    count = torch.full_like(ordered[:, :1], top_k, dtype=torch.int64)
    if top_p < 1.0:
        count = (running[:, :-1] < top_p * running[:, -1:]).sum(dim=-1, keepdim=True) + 1
    least = ordered.gather(-1, count - 1)
    above, equal = weights > least, weights == least
    room = count - above.sum(dim=-1, keepdim=True)
    return weights * (above | (equal & (equal.cumsum(dim=-1) <= room)))


def _falling(weights: Tensor) -> Tensor:
    """Each row in falling order. NumPy's vectorised sort of values alone takes a twentieth of torch's, which also
    gives ids."""
    return torch.from_numpy(np.sort(weights.numpy(), axis=-1)).flip(-1)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first id whose running sum exceeds u × the sum (rule 3 above).

    Args:
        weights: float64 [rows, vocab], not negative, at least one above 0 in each row.
        uniforms: float64 [rows] in [0, 1).

    Returns:
        int64 [rows].
    """
    running = weights.cumsum(dim=-1)
    target = uniforms[:, None] * running[:, -1:]
    return torch.searchsorted(running, target, right=True).squeeze(-1)
