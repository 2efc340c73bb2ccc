"""Losses against TRL 1.16's, stated again as mathematics.

Read from `GRPOTrainer._compute_loss` (loss_type grpo, dr_grpo, dapo; importance_sampling_level "sequence" with
loss_type grpo is GSPO) and `RLOOTrainer._compute_loss`, for one process and one accumulation step. With i a sequence,
t a token of it, n_i its length, N the number of sequences, A_i the advantage, l, l_old, l_ref log-probabilities, r a
ratio:

    gain(r, A)  A min(r, 1 + high) for A >= 0, A max(r, 1 - low) for A < 0
    k3_it       exp(l_ref - l) - (l_ref - l) - 1, the only divergence that TRL has inside a loss
    loss_it     -gain(exp(l - l_old), A_i) + beta k3_it

    grpo        mean over i of the mean over t of loss_it
    dr_grpo     sum over i, t of loss_it / (N max_completion_length)
    dapo        sum over i, t of loss_it / sum over i of n_i
    gspo        as grpo, with the ratio exp(mean over t of (l - l_old)) at every t
    rloo        mean over i of -gain(exp(sum over t of (l - l_old)), A_i)

Where Rollplex deviates on purpose, the test says so: `test_the_divergence_of_rloo_...`, `test_the_entropy_bonus_...`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, autograd
from torch.nn.utils.rnn import pad_sequence

from rollplex.protocol.trainer import Algorithm, Loss, Scale
from rollplex_trainer.losses import LossParts, unit_loss

LOW, HIGH, BETA, BONUS, MAX_TOKENS = 0.2, 0.28, 0.04, 0.05, 12
LENGTHS = (7, 1, 4, 9, 3, 6, 2, 5)
ADVANTAGES = (1.5, -0.8, 0.6, -1.7, 0.9, -0.3, 2.0, -1.2)
PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 1e-6)]
WHOLE_SEQUENCE = (Loss.GSPO, Loss.RLOO)


@dataclass(frozen=True)
class Response:
    """Of n tokens; every tensor is float64 [n], `current` and `entropy` with gradients."""

    advantage: float
    current: Tensor
    old: Tensor
    reference: Tensor
    entropy: Tensor


def responses(loss: Loss) -> list[Response]:
    """Ratios of the kind that `loss` uses run evenly, on a logarithmic scale, from 0.5 to 2."""
    draw = torch.Generator().manual_seed(11)
    total = sum(LENGTHS)
    tokens = iter((2 ** torch.linspace(-1, 1, total, dtype=torch.float64))[torch.randperm(total, generator=draw)].log())
    # Two ratios next to each other go to advantages of either sign.
    sequences = (2 ** torch.linspace(-1, 1, len(LENGTHS), dtype=torch.float64)).log()
    out = []
    for n, advantage, whole in zip(LENGTHS, ADVANTAGES, sequences, strict=True):
        if loss in WHOLE_SEQUENCE:
            spread = 0.2 * torch.rand(n, generator=draw, dtype=torch.float64)
            log_ratio = spread - spread.mean() + (whole if loss is Loss.GSPO else whole / n)
        else:
            log_ratio = torch.stack([next(tokens) for _ in range(n)])
        current = -3 * torch.rand(n, generator=draw, dtype=torch.float64) - 0.05
        out.append(
            Response(
                advantage=advantage,
                current=current.clone().requires_grad_(),
                old=current - log_ratio,
                reference=current + 0.5 * torch.randn(n, generator=draw, dtype=torch.float64),
                entropy=(4 * torch.rand(n, generator=draw, dtype=torch.float64)).requires_grad_(),
            )
        )
    return out


def gain(ratio: Tensor, advantage: float) -> Tensor:
    bounded = ratio.clamp(max=1 + HIGH) if advantage >= 0 else ratio.clamp(min=1 - LOW)
    return advantage * bounded


def token_losses(response: Response, beta: float, *, whole_sequence: bool = False) -> Tensor:
    """loss_it of one response, [n]."""
    log_ratio = response.current - response.old
    ratio = log_ratio.mean().exp() if whole_sequence else log_ratio.exp()
    distance = response.reference - response.current
    return beta * (distance.exp() - distance - 1) - gain(ratio, response.advantage)


def mean(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).mean()


def trl_grpo(batch: Sequence[Response], beta: float) -> Tensor:
    return mean([token_losses(response, beta).mean() for response in batch])


def trl_dr_grpo(batch: Sequence[Response], beta: float) -> Tensor:
    return torch.cat([token_losses(response, beta) for response in batch]).sum() / (len(batch) * MAX_TOKENS)


def trl_dapo(batch: Sequence[Response], beta: float) -> Tensor:
    return torch.cat([token_losses(response, beta) for response in batch]).mean()


def trl_gspo(batch: Sequence[Response], beta: float) -> Tensor:
    return mean([token_losses(response, beta, whole_sequence=True).mean() for response in batch])


def trl_rloo(batch: Sequence[Response], beta: float) -> Tensor:
    assert beta == 0, "TRL's RLOO has no divergence in its loss"
    return mean([-gain((r.current - r.old).sum().exp(), r.advantage) for r in batch])


TRL: dict[Loss, Callable[[Sequence[Response], float], Tensor]] = {
    Loss.GRPO: trl_grpo,
    Loss.DR_GRPO: trl_dr_grpo,
    Loss.DAPO: trl_dapo,
    Loss.GSPO: trl_gspo,
    Loss.RLOO: trl_rloo,
}


@dataclass(frozen=True)
class Ours:
    value: float
    by_logprob: list[list[float]]
    by_entropy: list[list[float]]
    parts: LossParts


def ours(
    loss: Loss,
    batch: Sequence[Response],
    *,
    kl: str = "k3",
    beta: float = 0.0,
    bonus: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Ours:
    """The same responses through `unit_loss`, padded with numbers that mean nothing."""
    rules = Algorithm(
        loss=loss, scale_rewards=Scale.NONE, clip_low=LOW, clip_high=HIGH, kl=kl, beta=beta, entropy_bonus=bonus,
        temperature=1.0, max_new_tokens=MAX_TOKENS,
    )  # fmt: skip

    def padded(name: str) -> Tensor:
        rows = [getattr(response, name).detach().to(dtype) for response in batch]
        return pad_sequence(rows, batch_first=True, padding_value=-7.0)

    logprobs, entropy = padded("current").requires_grad_(), padded("entropy").requires_grad_()
    parts = unit_loss(
        rules,
        logprobs=logprobs,
        old=padded("old"),
        reference=padded("reference") if beta else None,
        entropy=entropy if bonus else None,
        mask=torch.arange(logprobs.shape[1]) < torch.tensor(LENGTHS)[:, None],
        advantages=torch.tensor([response.advantage for response in batch], dtype=torch.float64),
        weights=torch.ones(len(batch), dtype=torch.float64),
    )
    mean_loss = parts.total / parts.normaliser
    autograd.backward(mean_loss)
    return Ours(mean_loss.item(), _ragged(logprobs.grad), _ragged(entropy.grad), parts)


def _ragged(gradient: Tensor | None) -> list[list[float]]:
    """By response; 0 without any. Nothing may have come to the padding."""
    if gradient is None:
        return [[0.0] * n for n in LENGTHS]
    assert not any(bool(row[n:].any()) for row, n in zip(gradient, LENGTHS, strict=True))
    return [row[:n].tolist() for row, n in zip(gradient.double(), LENGTHS, strict=True)]


def check(got: Ours, batch: Sequence[Response], truth: Tensor, tolerance: float) -> None:
    """The value, and the gradient by every log-probability and entropy."""
    assert got.value == pytest.approx(truth.item(), rel=tolerance, abs=tolerance)
    for gradients, leaves in (
        (got.by_logprob, [response.current for response in batch]),
        (got.by_entropy, [response.entropy for response in batch]),
    ):
        expected = autograd.grad(truth, leaves, allow_unused=True, materialize_grads=True, retain_graph=True)
        for mine, theirs in zip(gradients, expected, strict=True):
            assert mine == pytest.approx(theirs.tolist(), rel=tolerance, abs=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=["float64", "float32"])
@pytest.mark.parametrize(
    ("loss", "beta"), [(loss, beta) for loss in Loss for beta in (0.0, BETA) if loss is not Loss.RLOO or not beta]
)
def test_value_and_gradient_are_those_of_trl(loss: Loss, beta: float, dtype: torch.dtype, tolerance: float) -> None:
    batch = responses(loss)
    check(ours(loss, batch, beta=beta, dtype=dtype), batch, TRL[loss](batch, beta), tolerance)


@pytest.mark.parametrize("loss", list(Loss))
def test_ratios_run_from_one_half_to_2_and_either_clip_engages_and_is_passed_over(loss: Loss) -> None:
    batch = responses(loss)
    seen: list[tuple[float, float]] = []
    for response in batch:
        log_ratio = (response.current - response.old).detach()
        whole = {Loss.GSPO: log_ratio.mean(), Loss.RLOO: log_ratio.sum()}
        ratios = whole[loss].exp().view(1) if loss in WHOLE_SEQUENCE else log_ratio.exp()
        seen += [(ratio, response.advantage) for ratio in ratios.tolist()]
    for gaining in (True, False):
        assert any(ratio > 1 + HIGH and (advantage > 0) is gaining for ratio, advantage in seen)
        assert any(ratio < 1 - LOW and (advantage > 0) is gaining for ratio, advantage in seen)
    assert any(1 - LOW < ratio < 1 + HIGH for ratio, _ in seen)
    assert min(ratio for ratio, _ in seen) == pytest.approx(0.5)
    assert max(ratio for ratio, _ in seen) == pytest.approx(2.0)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=["float64", "float32"])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_the_divergence_of_rloo_is_a_term_of_the_loss_where_trl_takes_it_off_the_reward(
    kl: str, dtype: torch.dtype, tolerance: float
) -> None:
    """A deviation on purpose. TRL's RLOO subtracts beta * sum over t of (l_old - l_ref) from the reward, before the
    baseline, so it acts through the advantage. Ours adds beta * sum over t of the chosen estimate to the loss of each
    sequence, as our other losses do: rewards stay what the user's functions gave. Everything else is TRL's loss."""
    batch = responses(Loss.RLOO)
    estimates: dict[str, Callable[[Tensor], Tensor]] = {
        "k1": lambda x: x,
        "k2": lambda x: x**2 / 2,
        "k3": lambda x: (-x).exp() + x - 1,
    }
    divergence = mean([estimates[kl](r.current - r.reference).sum() for r in batch])
    truth = trl_rloo(batch, 0.0) + BETA * divergence
    check(ours(Loss.RLOO, batch, kl=kl, beta=BETA, dtype=dtype), batch, truth, tolerance)


@pytest.mark.parametrize("beta", [0.0, BETA])
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=["float64", "float32"])
def test_the_entropy_bonus_of_dapo_is_trls_mean_over_all_tokens(
    beta: float, dtype: torch.dtype, tolerance: float
) -> None:
    batch = responses(Loss.DAPO)
    truth = trl_dapo(batch, beta) - BONUS * torch.cat([response.entropy for response in batch]).mean()
    check(ours(Loss.DAPO, batch, beta=beta, bonus=BONUS, dtype=dtype), batch, truth, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=["float64", "float32"])
@pytest.mark.parametrize("loss", [loss for loss in Loss if loss is not Loss.DAPO])
def test_the_entropy_bonus_of_the_other_losses_is_aggregated_as_their_policy_term(
    loss: Loss, dtype: torch.dtype, tolerance: float
) -> None:
    """A deviation on purpose. TRL takes bonus * (mean of the entropy over all tokens of the batch) off every loss of
    GRPOTrainer, and has no bonus in RLOO. Ours aggregates the entropy as the loss does its tokens (verl does so), so
    that a step has one normaliser; only DAPO's is a mean over all tokens. The rest is TRL's loss."""
    batch = responses(loss)
    entropies = [response.entropy for response in batch]
    aggregated = {
        Loss.GRPO: mean([entropy.mean() for entropy in entropies]),
        Loss.GSPO: mean([entropy.mean() for entropy in entropies]),
        Loss.DR_GRPO: mean([entropy.sum() / MAX_TOKENS for entropy in entropies]),
        Loss.RLOO: mean([entropy.sum() for entropy in entropies]),
    }[loss]
    truth = TRL[loss](batch, 0.0)
    got = ours(loss, batch, bonus=BONUS, dtype=dtype)
    check(got, batch, truth - BONUS * aggregated, tolerance)
    assert abs(got.value - (truth - BONUS * torch.cat(entropies).mean()).item()) > 1e-4, "TRL's is another number"


def test_the_policy_term_that_is_reported_is_trls_policy_loss() -> None:
    """TRL reports the loss before the entropy bonus, the divergence included."""
    for loss in (Loss.GRPO, Loss.DR_GRPO, Loss.DAPO, Loss.GSPO):
        batch = responses(loss)
        parts = ours(loss, batch, beta=BETA, bonus=BONUS).parts
        assert (parts.policy / parts.normaliser).item() == pytest.approx(TRL[loss](batch, BETA).item(), rel=1e-12)
