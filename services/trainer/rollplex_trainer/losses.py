"""Policy losses as pure functions of log-probabilities.

Owns: the formulas. Does not know: models, segments, messages, gradient arenas.

Notation: i a sequence (row), t a token of it, n_i its number of tokens, l, l_old, l_ref log-probabilities, A_i the
advantage, w_i the weight (0 or 1), S the surrogate

    S(r, A) = -min(r * A, clip(r, 1 - low, 1 + high) * A)                       PPO, arXiv 1707.06347, eq. 7

Every loss of a step is (sum over sequences of w_i * L_i) / normaliser. A unit returns its part of the sum and its part
of the normaliser; the sum's gradient is divided once, when the parts of all units are in. So the split of a step into
units changes nothing but rounding.

| loss    | ratio                              | L_i                                      | normaliser     |
|---------|------------------------------------|------------------------------------------|----------------|
| GRPO    | r_it = exp(l_it - l_old,it)        | mean over t of S(r_it, A_i) + extra_it   | sum of w       |
| Dr.GRPO | r_it                               | sum over t of the same / max_new_tokens  | sum of w       |
| DAPO    | r_it                               | sum over t of the same                   | sum of w_i n_i |
| RLOO    | r_i = exp(sum_t (l_it - l_old,it)) | S(r_i, A_i) + sum over t of extra_it     | sum of w       |
| GSPO    | r_i = exp(mean_t (l_it - l_old,it))| S(r_i, A_i) + mean over t of extra_it    | sum of w       |

extra_it = beta * KL_it - entropy_bonus * H_it: KL and entropy are aggregated as the policy term of their loss is, so
each row of the table has one normaliser (verl aggregates so; TRL takes the entropy's mean over tokens for every loss,
which is the same for DAPO only). The functions take any l_old; on policy it is l itself, detached.
"""

from __future__ import annotations

from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from rollplex.errors import ConfigError
from rollplex.protocol.trainer import Algorithm, Loss


class LossParts(NamedTuple):
    """What one unit adds to the step's loss. Everything but `total` is detached."""

    total: Tensor
    """0-dim: sum over the unit's sequences of w_i * L_i. Backward starts here."""
    policy: Tensor
    """0-dim: the same without the entropy bonus (TRL's policy_loss)."""
    normaliser: Tensor
    """0-dim float64: what the unit adds to the step's normaliser."""
    ratio: Tensor
    """[rows, R] for ratios per token, [rows, 1] for ratios per sequence."""
    kl: Tensor | None
    """[rows, R], 0 where masked; None without reference."""


def unit_loss(
    algorithm: Algorithm,
    *,
    logprobs: Tensor,
    old: Tensor,
    reference: Tensor | None,
    entropy: Tensor | None,
    mask: Tensor,
    advantages: Tensor,
    weights: Tensor,
) -> LossParts:
    """The loss of one unit of sequences.

    Args:
        logprobs: [rows, R], with the graph to the parameters.
        old: [rows, R], no gradient.
        reference: [rows, R], no gradient; None without a reference (beta must be 0 then).
        entropy: [rows, R] of the policy at each position, with its graph; None if entropy_bonus is 0.
        mask: bool [rows, R], true on response tokens. What stands elsewhere is never looked at, NaN included.
        advantages: [rows].
        weights: [rows], 0 or 1. Rows of weight 0 are never looked at either.

    Raises:
        ConfigError: unknown kl, or beta / entropy_bonus without what they need.
    """
    if reference is None and algorithm.beta != 0.0:
        raise ConfigError("The KL term needs reference log-probabilities", got=f"beta {algorithm.beta}, no reference")
    if entropy is None and algorithm.entropy_bonus != 0.0:
        raise ConfigError("The entropy bonus needs entropies", got=f"entropy_bonus {algorithm.entropy_bonus}")
    counted = weights > 0
    seen = mask & counted.unsqueeze(1)
    advantages = torch.where(counted, advantages, 0.0).to(logprobs.dtype).unsqueeze(1)
    current = torch.where(seen, logprobs, 0.0)
    ratio = importance_ratio(algorithm.loss, current - torch.where(seen, old, 0.0), seen)
    surrogate = clipped_surrogate(ratio, advantages, low=algorithm.clip_low, high=algorithm.clip_high)
    rows = surrogate.squeeze(1) if _per_sequence(algorithm.loss) else _aggregate(algorithm, surrogate, seen)

    kl = None if reference is None else kl_estimate(algorithm.kl, current, torch.where(seen, reference, 0.0))
    if kl is not None and algorithm.beta != 0.0:
        rows = rows + algorithm.beta * _aggregate(algorithm, kl, seen)
    policy = total = _weighted_sum(rows, weights)
    if entropy is not None and algorithm.entropy_bonus != 0.0:
        bonus = _weighted_sum(_aggregate(algorithm, entropy, seen), weights)
        total = policy - algorithm.entropy_bonus * bonus
    return LossParts(
        total=total,
        policy=policy.detach(),
        normaliser=_normaliser(algorithm.loss, seen, weights),
        ratio=ratio.detach(),
        kl=None if kl is None else kl.detach(),
    )


def importance_ratio(loss: Loss, log_ratio: Tensor, seen: Tensor) -> Tensor:
    """exp of the log-ratio, per token [rows, R] or per sequence [rows, 1].

    Per token: GRPO, arXiv 2402.03300, eq. 3; Dr.GRPO, arXiv 2503.20783, 3.2; DAPO, arXiv 2503.14476, eq. 8 and 9.
    Sum over the sequence, as the whole response is one action: RLOO, arXiv 2402.14740; TRL 1.16, RLOOTrainer.
    Mean over the sequence: GSPO, arXiv 2507.18071, eq. 7; TRL's importance_sampling_level "sequence".

    Args:
        log_ratio: [rows, R], 0 where `seen` is false.
    """
    match loss:
        case Loss.GRPO | Loss.DR_GRPO | Loss.DAPO:
            return torch.exp(log_ratio)
        case Loss.RLOO:
            return torch.exp(log_ratio.sum(1, keepdim=True))
        case Loss.GSPO:
            return torch.exp(log_ratio.sum(1, keepdim=True) / _lengths(seen).unsqueeze(1))
        case _:
            assert_never(loss)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    """S(r, A) of the module docstring. high > low is DAPO's clip-higher (arXiv 2503.14476, 3.1)."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def clipped(ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Where the clip takes the gradient away, below and above; bool, shape of `ratio` (TRL's clip_ratio/*)."""
    return (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)


def kl_estimate(kind: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) at each token, [rows, R].

    With x = l - l_ref: k1 = x, k2 = x^2 / 2, k3 = exp(-x) + x - 1 (Schulman, "Approximating KL Divergence", 2020; k3 is
    GRPO's, arXiv 2402.03300, eq. 4, and TRL's). Inside a loss the gradient of k1 has expectation 0, that of k2 is the
    gradient of the KL itself on policy.

    Raises:
        ConfigError: `kind` is none of the three.
    """
    difference = logprobs - reference
    match kind:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            return torch.exp(-difference) + difference - 1
        case _:
            raise ConfigError("Unknown KL estimate", got=repr(kind), needed="k1, k2 or k3", where="algorithm.kl")


def _per_sequence(loss: Loss) -> bool:
    return loss in (Loss.RLOO, Loss.GSPO)


def _lengths(seen: Tensor) -> Tensor:
    return seen.sum(1).clamp(min=1)


def _aggregate(algorithm: Algorithm, values: Tensor, seen: Tensor) -> Tensor:
    """[rows, R] to [rows]: the third column of the table."""
    sums = torch.where(seen, values, 0.0).sum(1)
    match algorithm.loss:
        case Loss.GRPO | Loss.GSPO:
            return sums / _lengths(seen)
        case Loss.DR_GRPO:
            return sums / algorithm.max_new_tokens
        case Loss.DAPO | Loss.RLOO:
            return sums
        case _:
            assert_never(algorithm.loss)


def _weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    return (rows * weights.to(rows.dtype)).sum()


def _normaliser(loss: Loss, seen: Tensor, weights: Tensor) -> Tensor:
    """The last column of the table, 0-dim float64."""
    exact = weights.to(torch.float64)
    return (exact * seen.sum(1)).sum() if loss is Loss.DAPO else exact.sum()
