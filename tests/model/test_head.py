"""Logits of half-precision weights against the exact product of the same numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from rollplex.model import head
from rollplex.model.head import output_logits

HALVES = [torch.bfloat16, torch.float16]
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def problem(dtype: torch.dtype, place: str = "cpu") -> tuple[Tensor, Tensor]:
    """Hidden states [5, 64] and a weight [97, 64] whose logits are around 8."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, 64, generator=generator).to(place, dtype)
    weight = torch.randn(97, 64, generator=generator).to(place, dtype)
    return hidden.requires_grad_(), weight.requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_whole_precision_they_are_the_plain_product(dtype: torch.dtype) -> None:
    hidden, weight = problem(dtype)
    assert torch.equal(output_logits(hidden, weight), hidden @ weight.t())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", HALVES)
def test_of_half_precision_they_are_not_rounded_to_it(dtype: torch.dtype, place: str) -> None:
    hidden, weight = problem(dtype, place)
    exact = hidden.double() @ weight.double().t()
    logits = output_logits(hidden, weight)
    assert logits.dtype == torch.float32
    assert (logits.double() - exact).abs().max() < 1e-5
    assert (F.linear(hidden, weight).double() - exact).abs().max() > 1e-3, "rounded, which this test must tell apart"
    with torch.no_grad():
        assert torch.equal(output_logits(hidden, weight), logits)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_are_those_of_the_product_in_half_precision(dtype: torch.dtype, place: str) -> None:
    hidden, weight = problem(dtype, place)
    back = torch.randn(5, 97, generator=torch.Generator().manual_seed(4)).to(place)
    ours = torch.autograd.grad(output_logits(hidden, weight), [hidden, weight], back)
    plain = torch.autograd.grad(F.linear(hidden, weight).float(), [hidden, weight], back)
    for one, other in zip(ours, plain, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other)
    (alone,) = torch.autograd.grad(output_logits(hidden.detach(), weight), [weight], back)
    assert torch.equal(alone, ours[1])


def test_on_a_host_the_weight_is_widened_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = problem(torch.bfloat16)
    whole = output_logits(hidden, weight)
    for rows in (1, 10, 96):
        monkeypatch.setattr(head, "WIDENED_BYTES", rows * 4 * 64)
        assert torch.allclose(output_logits(hidden, weight), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_rows_give_no_logits(dtype: torch.dtype) -> None:
    hidden, weight = problem(dtype)
    assert output_logits(hidden[:0], weight).shape == (0, 97)


def test_any_number_of_dimensions_comes_before_the_hidden_states() -> None:
    hidden, weight = problem(torch.bfloat16)
    assert torch.equal(output_logits(hidden[None, :, None], weight), output_logits(hidden, weight)[None, :, None])
