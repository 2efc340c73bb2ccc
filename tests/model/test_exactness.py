"""Split against unsplit: the prefix once and the suffix per response equal a full forward of each sample alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rollplex.model.prefix import PrefixState, prefix_backward, prefix_forward
from rollplex.model.suffix import suffix_forward

TEXT_ONLY = [[11]]
ONE_IMAGE = [[3, ("image", (1, 4, 6)), 4]]
THREE_IMAGES = [[2, ("image", (1, 4, 4)), ("image", (1, 6, 8)), 3, ("image", (1, 2, 2)), 2]]
A_VIDEO = [[2, ("video", (3, 4, 4), 1.5), 5]]
MIXED = [
    [5],
    [2, ("image", (1, 4, 6)), 3],
    [1, ("video", (2, 4, 4), 0.5), 2, ("image", (1, 4, 4)), 4],
    [19],
]
CASES = {"text": TEXT_ONLY, "image": ONE_IMAGE, "images": THREE_IMAGES, "video": A_VIDEO, "mixed": MIXED}
SAMPLES = 3
LENGTHS = (4, 1, 6)


def leaves(state: PrefixState) -> PrefixState:
    def leaf(tensor: Tensor) -> Tensor:
        out = tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        out.grad = torch.zeros_like(out)
        return out

    return PrefixState(
        keys=[leaf(k) for k in state.keys],
        values=[leaf(v) for v in state.values],
        last_hidden=leaf(state.last_hidden),
        lengths=state.lengths,
        next_positions=state.next_positions,
    )


def split(
    kit: Any, store: Any, samples: list[Any], tokens: Tensor, lengths: Tensor, weight: Tensor, copies: int
) -> Any:
    """Log-probabilities, entropies and gradients through prefix and suffix, the way the two services do it."""
    store.zero()
    state = prefix_forward(store.model, kit.batch(samples, copies), grad=True)
    given = leaves(state)
    out = suffix_forward(store.model, given, tokens, lengths, temperature=0.9, never_sampled=kit.NEVER, entropy=True)
    ((out.logprobs + 0.3 * out.entropy) * weight * out.mask).sum().backward()
    prefix_backward(state, [k.grad for k in given.keys], [v.grad for v in given.values], given.last_hidden.grad)
    return out.logprobs.detach(), out.entropy.detach(), store.grads()


def unsplit(kit: Any, model: Any, samples: list[Any], tokens: Tensor, lengths: Tensor, weight: Tensor) -> Any:
    """The same from stock transformers, one sample at a time."""
    model.zero_grad()
    logprobs, entropies = torch.zeros_like(weight), torch.zeros_like(weight)
    for row in range(len(tokens)):
        end = int(lengths[row])
        logp, entropy = kit.full_logprobs(model, samples[row // SAMPLES], tokens[row, :end], 0.9)
        ((logp + 0.3 * entropy) * weight[row, :end]).sum().backward()
        logprobs[row, :end], entropies[row, :end] = logp.detach(), entropy.detach()
    return logprobs, entropies, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compare(kit: Any, name: str, case: str, *, tied: bool, frozen: bool, dtype: str) -> None:
    samples = [kit.sample(parts, seed) for seed, parts in enumerate(CASES[case])]
    tokens, lengths = kit.responses(LENGTHS * len(samples), 7)
    weight = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(3), dtype=getattr(torch, dtype))
    store = kit.store(name, tied=tied, frozen=frozen, dtype=dtype)
    stock = kit.stock(name, tied=tied, frozen=frozen, dtype=dtype)
    stock.model.visual.pixel_dtype = weight.dtype
    full = unsplit(kit, stock, samples, tokens, lengths, weight)
    bound = 1e-12 if dtype == "float64" else 1e-5
    for copies in (1, SAMPLES):
        ours = split(kit, store, samples, tokens, lengths, weight, copies)
        assert torch.allclose(ours[0], full[0], rtol=bound, atol=bound)
        assert torch.allclose(ours[1], full[1], rtol=bound, atol=bound)
        grads = dict(full[2])
        for name_, grad in list(grads.items()):
            if name_ not in ours[2]:
                assert not grad.any()
                del grads[name_]
        for name_ in list(ours[2]):
            if name_ not in grads:
                assert not ours[2][name_].any()
                del ours[2][name_]
        print(case, copies, kit.distance(ours[2], grads))
        assert kit.distance(ours[2], grads) < bound


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_split_equals_unsplit_in_float64(kit: Any, exact: None, case: str, frozen: bool, tied: bool) -> None:
    compare(kit, "tiny", case, tied=tied, frozen=frozen, dtype="float64")


@pytest.mark.parametrize("case", CASES)
def test_split_equals_unsplit_in_float32(kit: Any, case: str) -> None:
    compare(kit, "gpu", case, tied=False, frozen=False, dtype="float32")
