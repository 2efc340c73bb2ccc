"""What the passes hold, as predicted from shapes and as counted in the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rollplex.memory import predict
from rollplex.model.decode import Decoder
from rollplex.model.logprob import forbidden_ids
from rollplex.model.measure import GraphMeter, storage_bytes
from rollplex.model.prefix import PrefixState, prefix_forward
from rollplex.model.suffix import suffix_forward

PROMPTS: dict[str, list[list[Any]]] = {
    "one text": [[9]],
    "texts": [[30], [7], [19]],
    "one square image": [[3, ("image", (1, 4, 4)), 4]],
    "equal images": [[3, ("image", (1, 4, 4)), 4]] * 5,
    "images": [[2, ("image", (1, 4, 6)), ("image", (1, 10, 8))], [3, ("image", (1, 2, 2)), 2]],
    "video": [[2, ("video", (3, 6, 4), 1.5), 5], [40]],
}
MODELS = ["tiny", "gpu", "deep"]


def prefix(kit: Any, name: str, prompts: str, *, frozen: bool, dtype: str) -> Any:
    store = kit.store(name, frozen=frozen, dtype=dtype)
    batch = kit.batch([kit.sample(parts, seed) for seed, parts in enumerate(PROMPTS[prompts])])
    return store, batch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prompts", PROMPTS)
def test_prefix_activations_are_predicted_within_1_percent(
    kit: Any, name: str, prompts: str, frozen: bool, dtype: str
) -> None:
    store, batch = prefix(kit, name, prompts, frozen=frozen, dtype=dtype)
    with GraphMeter() as meter:
        state = prefix_forward(store.model, batch, grad=True)
    held = meter.held_bytes((*state.keys, *state.values, state.last_hidden), excluding=store.model.parameters())
    said = predict.prefix_activation_bytes(
        store.shape, rows=batch.rows, tokens=batch.tokens, grids=batch.grids, freeze_vision=frozen, dtype=dtype
    )
    assert said == pytest.approx(held, rel=0.01)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).requires_grad_()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("lengths", [(5, 5), (9, 2, 4, 1), (1, 1, 1), (16, 30)])
@pytest.mark.parametrize("name", MODELS)
def test_the_suffix_graph_is_predicted_within_1_percent(
    kit: Any, name: str, lengths: tuple[int, ...], entropy: bool, dtype: str
) -> None:
    store, batch = prefix(kit, name, "texts", frozen=True, dtype=dtype)
    plain = prefix_forward(store.model, batch, grad=False)
    state = PrefixState(
        keys=[leaf(k) for k in plain.keys],
        values=[leaf(v) for v in plain.values],
        last_hidden=leaf(plain.last_hidden),
        lengths=plain.lengths,
        next_positions=plain.next_positions,
    )
    all_lengths = lengths * batch.rows
    tokens, sizes = kit.responses(all_lengths, 1)
    with GraphMeter() as meter:
        out = suffix_forward(
            store.model, state, tokens, sizes, temperature=1.0, never_sampled=kit.NEVER, entropy=entropy
        )
    kept = (out.logprobs,) if out.entropy is None else (out.logprobs, out.entropy)
    given = (*store.model.parameters(), *state.keys, *state.values, state.last_hidden)
    held = meter.held_bytes(kept, excluding=given)
    said = predict.suffix_saved_bytes(
        store.shape, prompts=batch.rows, prefix_tokens=batch.tokens, lengths=all_lengths, entropy=entropy, dtype=dtype
    )
    shared = forbidden_ids(kit.NEVER, kit.VOCAB, tokens.device).nbytes
    assert said == pytest.approx(held - shared, rel=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_reference_and_rollout_kv_are_predicted_exactly(kit: Any, name: str, dtype: str) -> None:
    store, batch = prefix(kit, name, "images", frozen=True, dtype=dtype)
    state = prefix_forward(store.model, batch, grad=False)
    said = predict.kv_bytes(store.shape, rows=batch.rows, tokens=batch.tokens, dtype=dtype)
    assert said == storage_bytes((*state.keys, *state.values, state.last_hidden)) == state.size_bytes
    decoder = Decoder(store.model, state, 3, 8)
    rollout = predict.rollout_kv_bytes(
        store.shape, rows=batch.rows, tokens=batch.tokens, samples=3, max_new_tokens=8, dtype=dtype
    )
    assert rollout == decoder.kv_bytes
