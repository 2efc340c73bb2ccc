"""The one definition of log-probability, against independent statements of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rollplex.model.logprob import log_probabilities, token_logprobs
from support.operations import LiveBytes, Operations

NEVER = (2, 5, 40)
VOCAB = 11


def by_hand(logits: Tensor, temperature: float) -> Tensor:
    """exp(z / T) / sum over allowed ids, in float64, one by one."""
    allowed = [n for n in range(VOCAB) if n not in NEVER]
    out = torch.full((len(logits), VOCAB), float("-inf"), dtype=torch.float64)
    for row, values in enumerate(logits.double().tolist()):
        total = sum(torch.tensor(values[n] / temperature, dtype=torch.float64).exp() for n in allowed)
        for n in allowed:
            out[row, n] = values[n] / temperature - torch.as_tensor(total).log()
    return out


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_it_is_the_log_softmax_over_the_ids_that_may_be_sampled(temperature: float) -> None:
    logits = torch.randn(4, VOCAB + 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = log_probabilities(logits, temperature=temperature, never_sampled=NEVER, vocab=VOCAB)
    assert out.shape == (4, VOCAB)
    assert torch.allclose(out, by_hand(logits[:, :VOCAB], temperature), atol=1e-12)
    assert torch.allclose(out.exp().sum(-1), torch.ones(4, dtype=torch.float64))


def test_logits_are_left_as_they_were_and_half_precision_is_widened() -> None:
    logits = torch.randn(3, VOCAB).bfloat16()
    before = logits.clone()
    assert log_probabilities(logits, temperature=1.0, never_sampled=NEVER).dtype == torch.float32
    assert torch.equal(logits, before)


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 6, dtype=dtype, generator=generator, requires_grad=True)
    weight = torch.randn(VOCAB, 6, dtype=dtype, generator=generator, requires_grad=True)
    rows = torch.tensor([0, 0, 0, 1, 2, 2, 4, 3])
    tokens = torch.tensor([1, 3, 1, 0, 10, 4, 6, 7])
    return hidden, weight, rows, tokens


@pytest.mark.parametrize("rows_at_a_time", [1, 2, 5])
def test_token_log_probabilities_and_their_gradients_equal_autograd_on_the_definition(rows_at_a_time: int) -> None:
    hidden, weight, rows, tokens = problem(torch.float64)
    weights = torch.randn(8, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    options: Any = {"temperature": 0.7, "never_sampled": NEVER}
    plain = log_probabilities(hidden @ weight.t(), **options)
    finite = torch.where(plain.isinf(), 0.0, plain)
    entropy = -(plain.exp() * finite).sum(-1)
    expected = torch.autograd.grad((plain[rows, tokens] @ weights[0]) + entropy @ weights[1], [hidden, weight])
    picked, entropies = token_logprobs(
        hidden, weight, rows, tokens, **options, entropy=True, chunk_bytes=rows_at_a_time * VOCAB * 8
    )
    assert entropies is not None
    assert torch.allclose(picked, plain[rows, tokens], atol=1e-13)
    assert torch.allclose(entropies, entropy, atol=1e-13)
    got = torch.autograd.grad(picked @ weights[0] + entropies @ weights[1], [hidden, weight])
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("huge", [1e3, 1e30])
def test_ids_left_out_change_no_bit_and_get_no_gradient_even_where_their_logits_are_the_largest(huge: float) -> None:
    def results(fill: float) -> list[Tensor]:
        hidden, weight, rows, tokens = problem(torch.float32)
        with torch.no_grad():
            hidden.abs_()
            weight[[id_ for id_ in NEVER if id_ < VOCAB]] = fill
        logprobs, entropy = token_logprobs(
            hidden, weight, rows, tokens, temperature=0.7, never_sampled=NEVER, entropy=True
        )
        assert entropy is not None
        (logprobs.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None
        assert weight.grad is not None
        return [logprobs.detach(), entropy.detach(), hidden.grad, weight.grad]

    for calm, wild in zip(results(0.0), results(huge), strict=True):
        assert torch.equal(calm, wild)
        assert bool(wild.isfinite().all())
    assert not bool(results(huge)[3][[2, 5]].any())


def test_numerical_differences_agree_with_the_backward() -> None:
    hidden, weight, rows, tokens = problem(torch.float64)

    def function(hidden: Tensor, weight: Tensor) -> Any:
        return token_logprobs(hidden, weight, rows, tokens, temperature=0.9, never_sampled=NEVER, entropy=True)

    assert torch.autograd.gradcheck(function, (hidden, weight))


def test_an_entropy_that_is_in_no_loss_costs_the_backward_nothing() -> None:
    ran, gradients = [], []
    for entropy in (False, True):
        hidden, weight, rows, tokens = problem(torch.float64)
        picked, _ = token_logprobs(
            hidden,
            weight,
            rows,
            tokens,
            temperature=0.7,
            never_sampled=NEVER,
            entropy=entropy,
            chunk_bytes=2 * 8 * VOCAB,
        )
        with Operations() as operations:
            gradients.append(torch.autograd.grad(picked.sum(), [hidden, weight]))
        ran.append([operation.name for operation in operations.seen])
    assert sum("addmm" in name for name in ran[0]) == 3, "the backward was watched: three chunks"
    assert ran[0] == ran[1]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_loss_of_entropies_alone_has_the_gradient_of_the_definition() -> None:
    hidden, weight, rows, tokens = problem(torch.float64)
    options: Any = {"temperature": 0.7, "never_sampled": NEVER}
    plain = log_probabilities(hidden @ weight.t(), **options)
    entropy = -(plain.exp() * torch.where(plain.isinf(), 0.0, plain)).sum()
    expected = torch.autograd.grad(entropy, [hidden, weight])
    _, entropies = token_logprobs(hidden, weight, rows, tokens, **options, entropy=True)
    assert entropies is not None
    got = torch.autograd.grad(entropies.sum(), [hidden, weight])
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_without_entropy_there_is_none_and_frozen_inputs_get_no_gradient() -> None:
    hidden, weight, rows, tokens = problem(torch.float32)
    picked, entropies = token_logprobs(hidden.detach(), weight, rows, tokens, temperature=1.0, never_sampled=())
    assert entropies is None
    picked.sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert hidden.grad is None


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_two_chunks_of_logits_live_at_a_time_forward_and_backward(dtype: torch.dtype, entropy: bool) -> None:
    vocab, count, rows_at_a_time = 4096, 12, 3
    hidden = torch.randn(count, 8).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 8).to(dtype)
    rows, tokens = torch.arange(count), torch.randint(0, vocab, (count,))
    chunk = rows_at_a_time * vocab * (8 if dtype is torch.float64 else 4)
    widened = vocab * 8 * 4 if dtype is torch.bfloat16 else 0
    with LiveBytes() as live:
        picked, entropies = token_logprobs(
            hidden, weight, rows, tokens, temperature=0.7, never_sampled=(), entropy=entropy, chunk_bytes=chunk
        )
        total = picked.sum() if entropies is None else picked.sum() + entropies.sum()
        total.backward()  # type: ignore[no-untyped-call]
    assert chunk <= live.peak <= 2 * chunk + widened + 4096, "and what is one number for each row"


def test_half_precision_scores_in_float32_and_rounds_no_logit() -> None:
    hidden, weight, rows, tokens = problem(torch.bfloat16)
    picked, _ = token_logprobs(hidden, weight, rows, tokens, temperature=1.0, never_sampled=NEVER)
    picked.sum().backward()  # type: ignore[no-untyped-call]
    logits = (hidden.double() @ weight.double().t()).detach()
    expected = log_probabilities(logits, temperature=1.0, never_sampled=NEVER)[rows, tokens]
    assert picked.dtype == torch.float32
    assert torch.allclose(picked.double(), expected, atol=1e-6)
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
