"""Losses against formulas written out per token and sequence, in plain floating point."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import pytest
import torch
from torch import Tensor, autograd

from rollplex.errors import ConfigError
from rollplex.protocol.trainer import Algorithm, Loss, Scale
from rollplex_trainer.losses import LossParts, clipped, unit_loss

LENGTHS = (7, 1, 4, 9, 3, 6, 2, 5)
WIDTH = 9
ADVANTAGES = (1.3, -0.7, 0.0, -1.9, 0.4, 2.1, -0.2, -1.1)
RATIOS = (0.5, 0.62, 1.9, 0.55, 2.0, 0.79, 1.23, 1.05)
"""Of the sequences; those of single tokens run from 0.5 to 2 as well."""


def algorithm(loss: Loss, *, kl: str = "k3", beta: float = 0.0, entropy_bonus: float = 0.0) -> Algorithm:
    return Algorithm(
        loss=loss,
        scale_rewards=Scale.NONE,
        clip_low=0.2,
        clip_high=0.28,
        kl=kl,
        beta=beta,
        entropy_bonus=entropy_bonus,
        temperature=1.0,
        max_new_tokens=12,
    )


@dataclass
class Batch:
    logprobs: Tensor
    old: Tensor
    reference: Tensor
    entropy: Tensor
    mask: Tensor
    advantages: Tensor
    weights: Tensor

    def loss(self, rules: Algorithm, rows: slice = slice(None)) -> LossParts:
        return unit_loss(
            rules,
            logprobs=self.logprobs[rows],
            old=self.old[rows],
            reference=self.reference[rows] if rules.beta else None,
            entropy=self.entropy[rows] if rules.entropy_bonus else None,
            mask=self.mask[rows],
            advantages=self.advantages[rows],
            weights=self.weights[rows],
        )


def make_batch(loss: Loss, dtype: torch.dtype = torch.float64) -> Batch:
    """Sequences whose ratios, of the kind that `loss` uses, spread over 0.5 to 2."""
    draw = torch.Generator().manual_seed(5)
    logprobs = -3 * torch.rand(len(LENGTHS), WIDTH, generator=draw, dtype=torch.float64) - 0.05
    lengths = torch.tensor(LENGTHS)
    mask = torch.arange(WIDTH) < lengths.unsqueeze(1)
    if loss in (Loss.RLOO, Loss.GSPO):
        wanted = torch.tensor(RATIOS, dtype=torch.float64).log() * (1 if loss is Loss.RLOO else lengths)
        noise = 0.1 * torch.randn(mask.shape, generator=draw, dtype=torch.float64) * mask
        log_ratio = noise + ((wanted - noise.sum(1)) / lengths).unsqueeze(1)
    else:
        log_ratio = (2 * torch.rand(mask.shape, generator=draw, dtype=torch.float64) - 1) * math.log(2)
    return Batch(
        logprobs=logprobs.clone().to(dtype).requires_grad_(),
        old=(logprobs - log_ratio).to(dtype),
        reference=(logprobs + 0.5 * torch.randn(mask.shape, generator=draw, dtype=torch.float64)).to(dtype),
        entropy=(4 * torch.rand(mask.shape, generator=draw, dtype=torch.float64)).to(dtype).requires_grad_(),
        mask=mask,
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
        weights=torch.ones(len(LENGTHS), dtype=torch.float64),
    )


@dataclass
class Expected:
    value: float
    gradient: list[list[float]]
    entropy_gradient: list[list[float]]


def expected(batch: Batch, rules: Algorithm) -> Expected:
    """Value and gradients of the whole step's loss, derived by hand.

    A clipped surrogate -min(r A, clip(r) A) has derivative -r A by its log-ratio, except where the clip took over:
    r above 1 + high with A > 0, r below 1 - low with A < 0. There it is 0.
    """
    logprobs, old, reference = (t.detach().double().tolist() for t in (batch.logprobs, batch.old, batch.reference))
    entropy = batch.entropy.detach().double().tolist()
    tokens, sequences = sum(LENGTHS), len(LENGTHS)
    value = 0.0
    gradient = [[0.0] * WIDTH for _ in LENGTHS]
    entropy_gradient = [[0.0] * WIDTH for _ in LENGTHS]
    for i, (n, a) in enumerate(zip(LENGTHS, ADVANTAGES, strict=True)):
        per_token = {  # what one token's term is multiplied by in the step's loss
            Loss.GRPO: 1 / n / sequences,
            Loss.DR_GRPO: 1 / rules.max_new_tokens / sequences,
            Loss.DAPO: 1 / tokens,
            Loss.RLOO: 1 / sequences,
            Loss.GSPO: 1 / n / sequences,
        }[rules.loss]
        difference = [logprobs[i][t] - old[i][t] for t in range(n)]
        sequence_ratio = {Loss.RLOO: math.exp(sum(difference)), Loss.GSPO: math.exp(sum(difference) / n)}.get(
            rules.loss
        )
        if sequence_ratio is not None:
            value += surrogate(sequence_ratio, a, rules) / sequences
        for t in range(n):
            if sequence_ratio is None:
                ratio = math.exp(difference[t])
                value += per_token * surrogate(ratio, a, rules)
                gradient[i][t] += per_token * slope(ratio, a, rules)
            else:
                inner = 1.0 if rules.loss is Loss.RLOO else 1 / n
                gradient[i][t] += slope(sequence_ratio, a, rules) * inner / sequences
            kl, kl_slope = divergence(rules.kl, logprobs[i][t], reference[i][t])
            value += per_token * (rules.beta * kl - rules.entropy_bonus * entropy[i][t])
            gradient[i][t] += per_token * rules.beta * kl_slope
            entropy_gradient[i][t] = -per_token * rules.entropy_bonus
    return Expected(value, gradient, entropy_gradient)


def surrogate(ratio: float, advantage: float, rules: Algorithm) -> float:
    inside = min(max(ratio, 1 - rules.clip_low), 1 + rules.clip_high)
    return -min(ratio * advantage, inside * advantage)


def slope(ratio: float, advantage: float, rules: Algorithm) -> float:
    too_high = advantage > 0 and ratio > 1 + rules.clip_high
    too_low = advantage < 0 and ratio < 1 - rules.clip_low
    return 0.0 if too_high or too_low else -ratio * advantage


def divergence(kind: str, logprob: float, reference: float) -> tuple[float, float]:
    x = logprob - reference
    return {"k1": (x, 1.0), "k2": (x * x / 2, x), "k3": (math.exp(-x) - 1 + x, 1 - math.exp(-x))}[kind]


CASES = [(loss, kl, bonus) for loss in Loss for kl in ("", "k1", "k2", "k3") for bonus in (0.0, 0.05)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize(("loss", "kl", "bonus"), CASES)
def test_value_and_gradient_are_those_of_the_formula(
    loss: Loss, kl: str, bonus: float, dtype: torch.dtype, tolerance: float
) -> None:
    rules = algorithm(loss, kl=kl or "k3", beta=0.04 if kl else 0.0, entropy_bonus=bonus)
    batch = make_batch(loss, dtype)
    parts = batch.loss(rules)
    autograd.backward(parts.total / parts.normaliser)
    truth = expected(batch, rules)
    assert parts.total.item() / parts.normaliser.item() == pytest.approx(truth.value, rel=tolerance, abs=tolerance)
    assert batch.logprobs.grad is not None
    torch.testing.assert_close(
        batch.logprobs.grad.double(), torch.tensor(truth.gradient, dtype=torch.float64), rtol=tolerance, atol=tolerance
    )
    if bonus:
        assert batch.entropy.grad is not None
        truth_entropy = torch.tensor(truth.entropy_gradient, dtype=torch.float64)
        torch.testing.assert_close(batch.entropy.grad.double(), truth_entropy, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("loss", list(Loss))
def test_the_test_data_makes_both_clips_engage(loss: Loss) -> None:
    batch = make_batch(loss)
    rules = algorithm(loss)
    ratio = batch.loss(rules).ratio
    seen = batch.mask if ratio.size(1) > 1 else torch.ones_like(ratio, dtype=torch.bool)
    low, high = clipped(ratio, batch.advantages.unsqueeze(1), low=rules.clip_low, high=rules.clip_high)
    assert (low & seen).any()
    assert (high & seen).any()
    assert (~low & ~high & seen).any()
    assert 0.49 < ratio[seen].min() < 0.65
    assert 1.6 < ratio[seen].max() < 2.01


@pytest.mark.parametrize("loss", list(Loss))
def test_units_add_up_to_the_whole_step(loss: Loss) -> None:
    rules = algorithm(loss, beta=0.04, entropy_bonus=0.05)
    whole, split = make_batch(loss), make_batch(loss)
    parts = whole.loss(rules)
    autograd.backward(parts.total / parts.normaliser)
    normaliser = value = 0.0
    for rows in (slice(0, 3), slice(3, 4), slice(4, 8)):
        unit = split.loss(rules, rows)
        autograd.backward(unit.total)
        normaliser += unit.normaliser.item()
        value += unit.total.item()
    assert normaliser == parts.normaliser.item()
    assert value / normaliser == pytest.approx((parts.total / parts.normaliser).item(), rel=1e-13)
    assert whole.logprobs.grad is not None
    assert split.logprobs.grad is not None
    torch.testing.assert_close(split.logprobs.grad / normaliser, whole.logprobs.grad, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("loss", list(Loss))
def test_what_is_masked_or_weighs_nothing_is_never_looked_at(loss: Loss) -> None:
    rules = algorithm(loss, beta=0.04, entropy_bonus=0.05)
    clean, dirty = make_batch(loss), make_batch(loss)
    clean.weights[2] = dirty.weights[2] = 0.0
    hidden = ~(dirty.mask & (dirty.weights > 0).unsqueeze(1))
    with torch.no_grad():
        for values in (dirty.logprobs, dirty.old, dirty.reference, dirty.entropy):
            values[hidden] = math.nan
    dirty.advantages[2] = math.nan
    for batch in (clean, dirty):
        autograd.backward(batch.loss(rules).total)
    assert torch.equal(clean.loss(rules).total, dirty.loss(rules).total)
    assert torch.equal(clean.loss(rules).normaliser, dirty.loss(rules).normaliser)
    assert clean.logprobs.grad is not None
    assert dirty.logprobs.grad is not None
    assert torch.equal(clean.logprobs.grad, dirty.logprobs.grad)
    assert not dirty.logprobs.grad[hidden].any()


@pytest.mark.parametrize("loss", list(Loss))
def test_a_sequence_of_weight_0_changes_the_rest_in_no_way(loss: Loss) -> None:
    rules = algorithm(loss, beta=0.04, entropy_bonus=0.05)
    without, zeroed = make_batch(loss), make_batch(loss)
    zeroed.weights[-1] = 0.0
    rest = without.loss(rules, slice(0, -1))
    all_rows = zeroed.loss(rules)
    assert all_rows.normaliser.item() == rest.normaliser.item()
    assert all_rows.total.item() == pytest.approx(rest.total.item(), rel=1e-14)


def test_on_policy_the_ratio_is_1_and_the_gradient_that_of_the_policy() -> None:
    batch = make_batch(Loss.DAPO)
    batch.old = batch.logprobs.detach()
    parts = batch.loss(algorithm(Loss.DAPO))
    autograd.backward(parts.total)
    assert torch.equal(parts.ratio, torch.ones_like(parts.ratio))
    assert batch.logprobs.grad is not None
    assert torch.equal(batch.logprobs.grad, torch.where(batch.mask, -batch.advantages.unsqueeze(1), 0.0))


def test_policy_is_the_loss_without_the_entropy_bonus() -> None:
    batch = make_batch(Loss.GRPO)
    rules = algorithm(Loss.GRPO, beta=0.04, entropy_bonus=0.05)
    plain = batch.loss(msgspec.structs.replace(rules, entropy_bonus=0.0))
    assert torch.equal(batch.loss(rules).policy, plain.total)
    assert batch.loss(rules).total < plain.total


def test_terms_without_their_inputs_are_refused() -> None:
    batch = make_batch(Loss.GRPO)
    rows = {
        "logprobs": batch.logprobs,
        "old": batch.old,
        "mask": batch.mask,
        "advantages": batch.advantages,
        "weights": batch.weights,
    }
    with pytest.raises(ConfigError, match="reference"):
        unit_loss(algorithm(Loss.GRPO, beta=0.1), reference=None, entropy=None, **rows)
    with pytest.raises(ConfigError, match="entropies"):
        unit_loss(algorithm(Loss.GRPO, entropy_bonus=0.1), reference=None, entropy=None, **rows)
    with pytest.raises(ConfigError, match="k4"):
        unit_loss(algorithm(Loss.GRPO, kl="k4", beta=0.1), reference=batch.reference, entropy=None, **rows)
