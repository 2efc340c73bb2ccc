"""The slow path: what transformers' own model says, over mapped weights, one sequence at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rollplex.memory import predict
from rollplex.model.build import build
from rollplex.model.measure import GraphMeter
from rollplex.model.whole import whole_forward

PROMPTS: dict[str, list[Any]] = {
    "text": [11],
    "image": [3, ("image", (1, 4, 6)), 4],
    "images": [2, ("image", (1, 4, 4)), ("image", (1, 10, 8)), 3, ("image", (1, 2, 2)), 2],
    "video": [2, ("video", (3, 4, 4), 1.5), 5],
    "both": [1, ("video", (2, 4, 4), 0.5), 2, ("image", (1, 4, 4)), 4, ("video", (2, 2, 4), 1.0), 1],
}
TEMPERATURE = 0.9


def plain(store: Any, *, frozen: bool = False) -> Any:
    return build(store.folder, store.table, store.views, gradients=store.gradients, freeze_vision=frozen, plain=True)


def backward(logprobs: Tensor, entropy: Tensor) -> None:
    (logprobs * torch.arange(1, len(logprobs) + 1) + 0.3 * entropy).sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("chunk_bytes", [2**20, 1], ids=["one chunk", "a chunk per token"])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", ["tiny", "deep", "qwen2"])
def test_it_is_transformers_own_forward_and_backward(kit: Any, name: str, prompt: str, chunk_bytes: int) -> None:
    tied, frozen = name == "deep", name == "deep" and prompt == "images"
    sample = kit.sample(PROMPTS[prompt], 3, name)
    response = kit.responses([6], 5)[0][0]
    stock = kit.stock(name, tied=tied, frozen=frozen)
    logprobs, entropy = kit.full_logprobs(stock, sample, response, TEMPERATURE)
    backward(logprobs, entropy)

    store = kit.shared_store(name, tied=tied, frozen=frozen)
    got, got_entropy = whole_forward(
        plain(store, frozen=frozen),
        kit.batch([sample]),
        response,
        temperature=TEMPERATURE,
        never_sampled=kit.NEVER,
        chunk_bytes=chunk_bytes,
    )
    assert torch.allclose(got, logprobs, rtol=0, atol=2e-6)
    assert torch.allclose(got_entropy, entropy, rtol=0, atol=2e-6)
    backward(got, got_entropy)
    theirs = {n: p.grad for n, p in stock.named_parameters() if p.grad is not None}
    ours = {n: p.grad for n, p in store.model.named_parameters() if p.grad is not None}
    assert kit.distance({n: ours[n] for n in theirs}, theirs) < 1e-5
    assert not any(bool(ours[n].any()) for n in ours.keys() - theirs.keys())


def test_ours_and_the_plain_model_share_parameters_and_arena_and_nothing_that_computes(kit: Any) -> None:
    store = kit.shared_store("gpu")
    model = plain(store)
    for (name, one), (_, other) in zip(store.model.named_parameters(), model.named_parameters(), strict=True):
        assert one.data_ptr() == other.data_ptr(), name
        assert one.grad.data_ptr() == other.grad.data_ptr(), name
    for tower in (model.model.language_model, model.model.visual):
        assert tower.config._attn_implementation == "sdpa"
    assert type(model.model.visual.patch_embed.proj).__name__ == "Conv3d"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["tiny", "gpu", "deep", "qwen2"])
def test_what_its_graph_holds_is_at_most_what_is_predicted_and_not_much_less(
    kit: Any, name: str, frozen: bool, dtype: str
) -> None:
    store = kit.shared_store(name, frozen=frozen, dtype=dtype)
    model = plain(store, frozen=frozen)
    for prompt, parts in PROMPTS.items():
        batch = kit.batch([kit.sample(parts, 3, name)])
        response = kit.responses([6], 5)[0][0]
        with GraphMeter() as meter:
            out = whole_forward(model, batch, response, temperature=1.0, never_sampled=kit.NEVER)
        held = meter.held_bytes(out, excluding=model.parameters())
        tokens = batch.tokens + len(response)
        said = predict.whole_saved_bytes(
            store.shape, tokens=tokens, grids=batch.grids, freeze_vision=frozen, dtype=dtype
        )
        assert 0.9 * said <= held <= said, (prompt, held / said)
