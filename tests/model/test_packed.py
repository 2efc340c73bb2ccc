"""The packed suffix pass against the padded one, and its parts against attention written out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, autograd

from rollplex.errors import EngineError
from rollplex.memory import predict
from rollplex.model import flash
from rollplex.model.build import build
from rollplex.model.logprob import forbidden_ids
from rollplex.model.measure import GraphMeter
from rollplex.model.packed import PackedContext, packing
from rollplex.model.prefix import prefix_forward
from rollplex.model.suffix import suffix_forward

PROMPTS: list[list[Any]] = [[9], [2, ("image", (1, 4, 6)), 3], [30]]
"""Of unequal length."""
LENGTHS = {
    "ragged": (4, 1, 6, 2, 5, 3, 6, 6, 1),
    "equal": (5,) * 9,
    "one prompt feeds nothing": (3, 2, 5, 1, 1, 1, 4, 4, 4),
    "one token is fed": (1, 1, 1, 1, 2, 1, 1, 1, 1),
    "no token is fed": (1,) * 9,
}
BOUND = 0.01 if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 17) else 0.05


@dataclass(frozen=True)
class Result:
    """What a pass gives, and the gradients that it leaves: of parameters, and of K, V and the last hidden state."""

    logprobs: Tensor
    entropy: Tensor
    parameters: dict[str, Tensor]
    prefix: list[Tensor]


def run(kit: Any, name: str, lengths: tuple[int, ...], dtype: str, *, packed: bool) -> Result:
    store = kit.shared_store(name, dtype=dtype)
    batch = kit.batch([kit.sample(parts, seed, name) for seed, parts in enumerate(PROMPTS)])
    state = kit.leaves(prefix_forward(store.model, batch, grad=False))
    tokens, sizes = kit.responses(lengths, 1)
    out = suffix_forward(
        store.model, state, tokens, sizes, temperature=0.9, never_sampled=kit.NEVER, entropy=True, packed=packed
    )
    assert out.entropy is not None
    draw = torch.Generator().manual_seed(2)
    weight = torch.randn(out.logprobs.shape, generator=draw).to(out.logprobs.dtype)
    autograd.backward((weight * out.logprobs + 0.3 * weight.flip(1) * out.entropy).sum())
    grads = [leaf.grad for leaf in (*state.keys, *state.values, state.last_hidden)]
    assert all(grad is not None for grad in grads)
    return Result(out.logprobs.detach(), out.entropy.detach(), store.grads(), grads)


def worst(ours: list[Tensor], theirs: list[Tensor]) -> float:
    scale = max(float(b.abs().max()) for b in theirs)
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) / max(scale, 1e-30)


@pytest.mark.parametrize("case", LENGTHS)
@pytest.mark.parametrize(
    ("name", "dtype", "bound"),
    [("gpu", "float64", 1e-6), ("deep", "float64", 1e-6), ("qwen2", "float32", 2e-5), ("gpu", "bfloat16", 6e-2)],
)
def test_values_and_all_gradients_are_those_of_the_padded_pass(
    kit: Any, name: str, dtype: str, bound: float, case: str
) -> None:
    """float64: transformers' norms round to float32, the same in both, but not of the same order of sums."""
    packed, padded = (run(kit, name, LENGTHS[case], dtype, packed=way) for way in (True, False))
    assert worst([packed.logprobs], [padded.logprobs]) < bound
    assert worst([packed.entropy], [padded.entropy]) < bound
    assert worst(packed.prefix, padded.prefix) < bound
    assert kit.distance(packed.parameters, padded.parameters) < 4 * bound
    assert any(bool(grad.any()) for grad in packed.prefix)


def test_nothing_reaches_the_padding_of_a_prompt(kit: Any) -> None:
    store = kit.shared_store("gpu")
    batch = kit.batch([kit.sample(parts, seed) for seed, parts in enumerate(PROMPTS)])
    state = kit.leaves(prefix_forward(store.model, batch, grad=False))
    with torch.no_grad():
        for row, length in enumerate(batch.lengths.tolist()):
            for part in (*state.keys, *state.values):
                part[row, :, length:] = float("nan")
    tokens, sizes = kit.responses(LENGTHS["ragged"], 1)
    out = suffix_forward(store.model, state, tokens, sizes, temperature=1.0, never_sampled=kit.NEVER, packed=True)
    autograd.backward(out.logprobs.sum())
    assert bool(torch.isfinite(out.logprobs).all())
    for row, length in enumerate(batch.lengths.tolist()):
        for leaf in (*state.keys, *state.values):
            assert leaf.grad is not None
            assert bool(torch.isfinite(leaf.grad).all())
            assert not bool(leaf.grad[row, :, length:].any())


def written_out(
    q: Tensor, k: Tensor, v: Tensor, keys: list[Tensor], values: list[Tensor], lengths: list[int]
) -> Tensor:
    """Each response by itself: keys of its prompt and its own, one softmax, one head at a time."""
    group, start, outs = q.shape[1] // k.shape[1], 0, []
    for number, length in enumerate(lengths):
        at, own = slice(start, start + length), []
        for head in range(q.shape[1]):
            past, kv = keys[number], head // group
            both = torch.cat([past[kv], k[at, kv]])
            scores = 0.3 * q[at, head] @ both.t()
            hidden = torch.ones(length, length).triu(1).bool()
            scores[:, past.shape[1] :].masked_fill_(hidden, float("-inf"))
            own.append(torch.softmax(scores, -1) @ torch.cat([values[number][kv], v[at, kv]]))
        outs.append(torch.stack(own, 1))
        start += length
    return torch.cat(outs)


def test_the_merged_attention_and_its_gradients_are_those_of_one_softmax() -> None:
    draw = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()

    fed, prompts = torch.tensor([3, 0, 2, 4, 1, 1]), torch.tensor([5, 7, 2])
    q, k, v = numbers(11, 4, 8), numbers(11, 2, 8), numbers(11, 2, 8)
    keys, values = numbers(3, 2, 7, 8), numbers(3, 2, 7, 8)
    context = PackedContext(keys=[keys], values=[values], packing=packing(fed, prompts))
    query, key, value = (t.transpose(0, 1)[None] for t in (q, k, v))
    ours = context.attend(0, query, key, value, scaling=0.3)[0]
    prompt_of = [0, 1, 1, 2, 2]
    cut_keys, cut_values = ([t[p, :, : int(prompts[p])] for p in prompt_of] for t in (keys, values))
    truth = written_out(q, k, v, cut_keys, cut_values, [3, 2, 4, 1, 1])
    assert torch.allclose(ours, truth, rtol=1e-12, atol=1e-12)
    d_out = torch.randn(truth.shape, generator=draw, dtype=torch.float64)
    inputs = (q, k, v, keys, values)
    for one, other in zip(autograd.grad(ours, inputs, d_out), autograd.grad(truth, inputs, d_out), strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-12)


def test_places_of_responses_that_feed_nothing_are_left_out() -> None:
    plan = packing(torch.tensor([3, 0, 0, 0, 4, 1]), torch.tensor([5, 7, 2]))
    assert plan.own.lengths == (3, 4, 1)
    assert plan.own.boundaries.tolist() == [0, 3, 7, 8]
    assert plan.own.boundaries.dtype is torch.int32
    assert plan.spans == ((0, 3), (3, 3), (3, 8))
    assert [number for number, _, _ in plan.prompts()] == [0, 2]


def test_a_log_sum_exp_of_another_layout_is_refused() -> None:
    with pytest.raises(EngineError, match=r"another layout; got \(5, 2\).*needed \(2, 5\)"):
        flash._checked(torch.zeros(5, 2), torch.zeros(5, 2, 8))


@pytest.mark.parametrize(("name", "dtype"), [("tiny", "float32"), ("gpu", "bfloat16"), ("deep", "float64")])
@pytest.mark.parametrize("entropy", [False, True])
def test_the_packed_graph_is_predicted_within_the_bound(kit: Any, name: str, dtype: str, entropy: bool) -> None:
    store = kit.shared_store(name, dtype=dtype)
    batch = kit.batch([kit.sample(parts, seed) for seed, parts in enumerate(PROMPTS)])
    state = kit.leaves(prefix_forward(store.model, batch, grad=False))
    known = (*store.model.parameters(), *state.keys, *state.values, state.last_hidden)
    shared = forbidden_ids(kit.NEVER, kit.VOCAB, torch.device("cpu")).nbytes
    for lengths in [(5, 5), (9, 2, 4, 1), (1, 1, 1), (16, 30)]:
        tokens, sizes = kit.responses(lengths * batch.rows, 1)
        with GraphMeter() as meter:
            out = suffix_forward(
                store.model,
                state,
                tokens,
                sizes,
                temperature=1.0,
                never_sampled=kit.NEVER,
                entropy=entropy,
                packed=True,
            )
            kept = (out.logprobs,) if out.entropy is None else (out.logprobs, out.entropy)
            held = meter.held_bytes(kept, excluding=known)
        said = predict.packed_suffix_saved_bytes(
            store.shape, prompts=batch.rows, lengths=lengths * batch.rows, entropy=entropy, dtype=dtype
        )
        assert said == pytest.approx(held - shared, rel=BOUND), lengths


def test_it_is_packed_where_flash_attention_runs() -> None:
    places = {
        (dtype, dim, cuda): predict.packs_suffix(dtype, dim, cuda=cuda)
        for dtype, dim, cuda in product(["float32", "bfloat16", "float64"], [8, 20, 128, 264], [False, True])
    }
    assert {place for place, packed in places.items() if packed} == {("bfloat16", 8, True), ("bfloat16", 128, True)}


def test_fused_modules_run_packed_too(kit: Any) -> None:
    """As on a GPU, where both go together."""
    store = kit.shared_store("gpu")
    model = build(store.folder, store.table, store.views, gradients=store.gradients, freeze_vision=False, fused=True)
    batch = kit.batch([kit.sample(parts, seed) for seed, parts in enumerate(PROMPTS)])
    tokens, sizes = kit.responses(LENGTHS["ragged"], 1)
    results = []
    for way in (False, True):
        store.zero()
        state = kit.leaves(prefix_forward(model, batch, grad=False))
        out = suffix_forward(model, state, tokens, sizes, temperature=1.0, never_sampled=kit.NEVER, packed=way)
        autograd.backward(out.logprobs.sum())
        grads = [leaf.grad for leaf in (*state.keys, *state.values, state.last_hidden)]
        results.append([out.logprobs.detach(), *(grad.clone() for grad in (*grads, *store.gradients.values()))])
    assert all(worst([a], [b]) < 1e-4 for a, b in zip(*results, strict=True) if bool(b.any()))
