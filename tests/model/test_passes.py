"""Who is called how often, with what shapes: prefix, suffix, decode."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from rollplex.errors import DataError, EngineError
from rollplex.layout.kv import KvLayout
from rollplex.memory.segment import backend
from rollplex.memory.tensors import kv_views
from rollplex.model import attention
from rollplex.model.decode import Decoder
from rollplex.model.logprob import log_probabilities
from rollplex.model.prefix import export_state, leaf_state, prefix_backward, prefix_forward
from rollplex.model.suffix import suffix_forward

PROMPTS: list[list[Any]] = [
    [5],
    [2, ("image", (1, 4, 6)), ("image", (1, 4, 4)), 3],
    [1, ("video", (2, 4, 4), 0.5), 4],
]


def samples_of(kit: Any) -> list[Any]:
    return [kit.sample(parts, seed) for seed, parts in enumerate(PROMPTS)]


@contextmanager
def calls(model: Any) -> Iterator[Counter[str]]:
    """How often the vision tower, the layers and the output layer are called; and with how many rows."""
    count: Counter[str] = Counter()

    def counted(name: str) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
            count[name] += 1
            count[f"{name} rows"] += args[0].shape[0] if args else 0

        return hook

    model_parts = [("tower", model.model.visual), ("head", model.lm_head)]
    model_parts += [("layer", layer) for layer in model.model.language_model.layers]
    handles = [part.register_forward_pre_hook(counted(name), with_kwargs=True) for name, part in model_parts]
    try:
        yield count
    finally:
        for handle in handles:
            handle.remove()


def test_the_vision_tower_runs_once_per_prompt_whatever_the_group_size(kit: Any) -> None:
    store, samples = kit.shared_store(), samples_of(kit)
    batch = kit.batch(samples)
    with calls(store.model) as count:
        prefix_forward(store.model, batch, grad=False)
    assert count["tower"] == 1
    assert count["tower rows"] == sum(len(p) for s in samples for p in s.pixels)
    assert batch.vision_prompts == 2
    replicated = kit.batch(samples, 4)
    with calls(store.model) as count:
        prefix_forward(store.model, replicated, grad=False)
    assert count["tower rows"] == 4 * sum(len(p) for s in samples for p in s.pixels)
    assert replicated.vision_prompts == 8


def test_prefix_keys_have_the_batch_of_prompts_and_layer_calls_do_not_grow_with_the_group(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, batch = kit.shared_store("gpu"), kit.batch(samples_of(kit))
    state = prefix_forward(store.model, batch, grad=False)
    shapes: list[tuple[int, ...]] = []
    original = attention.attend_prefix_and_own

    def spy(query: Tensor, keys: Tensor, values: Tensor, *own: Tensor, **options: Any) -> Tensor:
        shapes.extend((tuple(keys.shape), tuple(values.shape)))
        assert any(keys.data_ptr() == key.data_ptr() for key in state.keys)
        return original(query, keys, values, *own, **options)

    monkeypatch.setattr(attention, "attend_prefix_and_own", spy)
    layers = {}
    for group in (2, 8):
        tokens, lengths = kit.responses([4] * 3 * group, 0)
        with calls(store.model) as count:
            suffix_forward(store.model, state, tokens, lengths, temperature=1.0, never_sampled=kit.NEVER)
        layers[group] = count["layer"]
        assert count["tower"] == 0
    assert layers[2] == layers[8] == store.shape.layers
    assert set(shapes) == {(3, store.shape.kv_heads, batch.tokens, store.shape.head_dim)}


def test_a_prefix_without_gradients_holds_contiguous_tensors_and_no_graph(kit: Any) -> None:
    state = prefix_forward(kit.shared_store().model, kit.batch(samples_of(kit)), grad=False)
    for tensor in (*state.keys, *state.values, state.last_hidden):
        assert tensor.is_contiguous()
        assert not tensor.requires_grad


def test_a_response_of_one_token_needs_no_layer(kit: Any) -> None:
    store, samples = kit.shared_store(), samples_of(kit)
    state = prefix_forward(store.model, kit.batch(samples), grad=False)
    tokens, lengths = kit.responses([1] * 6, 2)
    with torch.no_grad(), calls(store.model) as count:
        out = suffix_forward(store.model, state, tokens, lengths, temperature=1.0, never_sampled=kit.NEVER)
    assert count["layer"] == 0
    full = kit.full_logprobs(kit.stock(), samples[1], tokens[3])[0]
    assert torch.allclose(out.logprobs[3], full, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_decoding_in_half_precision_rounds_no_logit(kit: Any, tied: bool) -> None:
    store = kit.shared_store(tied=tied, dtype="bfloat16")
    state = prefix_forward(store.model, kit.batch(samples_of(kit)), grad=False)
    decoder = Decoder(store.model, state, 2, 2)
    first = decoder.first_logits()
    exact = state.last_hidden.double() @ store.model.lm_head.weight.double().t()
    assert first.dtype == decoder.step(torch.zeros(6, dtype=torch.int64)).dtype == torch.float32
    assert torch.allclose(first.double(), exact.repeat_interleave(2, 0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ["tiny", "gpu"])
def test_decoding_gives_the_log_probabilities_of_the_suffix_pass(kit: Any, name: str, temperature: float) -> None:
    store, longest, group = kit.shared_store(name), 6, 3
    state = prefix_forward(store.model, kit.batch(samples_of(kit)), grad=False)
    tokens, lengths = kit.responses([longest] * 3 * group, 5)
    decoder = Decoder(store.model, state, group, longest)
    with calls(store.model) as count:
        logits = [decoder.first_logits()]
    assert count["head rows"] == 3
    logits += [decoder.step(tokens[:, n]) for n in range(longest - 1)]
    rollout = torch.stack(
        [
            log_probabilities(step, temperature=temperature, never_sampled=kit.NEVER).gather(1, tokens[:, n, None])[
                :, 0
            ]
            for n, step in enumerate(logits)
        ],
        1,
    )
    with torch.no_grad():
        out = suffix_forward(store.model, state, tokens, lengths, temperature=temperature, never_sampled=kit.NEVER)
    assert torch.allclose(rollout, out.logprobs, atol=1e-5)
    with pytest.raises(AssertionError, match="step 6 of a decoder made for 5"):
        decoder.step(tokens[:, 0])


def test_a_decoder_for_one_token_gives_first_logits_and_takes_no_step(kit: Any) -> None:
    store = kit.shared_store()
    state = prefix_forward(store.model, kit.batch(samples_of(kit)), grad=False)
    decoder = Decoder(store.model, state, 2, 1)
    assert decoder.first_logits().shape == (6, kit.VOCAB)
    assert decoder.kv_bytes == state.size_bytes
    with pytest.raises(AssertionError, match="made for 0"):
        decoder.step(torch.zeros(6, dtype=torch.int64))


def test_unequal_responses_get_what_they_get_alone_and_zero_at_padding(kit: Any) -> None:
    store = kit.shared_store()
    state = prefix_forward(store.model, kit.batch(samples_of(kit)), grad=False)
    tokens, lengths = kit.responses([5, 2, 1, 3, 5, 4], 6)
    options: dict[str, Any] = {"temperature": 1.0, "never_sampled": kit.NEVER, "entropy": True}
    with torch.no_grad():
        out: Any = suffix_forward(store.model, state, tokens, lengths, **options)
        for row, length in enumerate(lengths.tolist()):
            prompt = row // 2
            alone: Any = suffix_forward(
                store.model,
                state.select(slice(prompt, prompt + 1)),
                tokens[row : row + 1, :length],
                lengths[row : row + 1],
                **options,
            )
            assert torch.allclose(out.logprobs[row, :length], alone.logprobs[0], atol=1e-5)
            assert torch.allclose(out.entropy[row, :length], alone.entropy[0], atol=1e-5)
    assert torch.equal(out.mask, torch.arange(5) < lengths[:, None])
    assert not out.logprobs[~out.mask].any()
    assert not out.entropy[~out.mask].any()


def test_the_trainer_leaves_gradients_in_the_segment_and_the_prefix_takes_them_from_there(kit: Any) -> None:
    store = kit.shared_store()
    batch = kit.batch(samples_of(kit))
    tokens, lengths = kit.responses([3, 2, 4, 4, 1, 2], 8)
    state = prefix_forward(store.model, batch, grad=True)
    reference = kit.leaves(state)
    layout = KvLayout(store.shape, batch.rows, batch.tokens, "float32")
    host = backend("host")
    fd = host.create(layout.total_bytes, "kv")
    with host.map(fd, layout.total_bytes) as mapping:
        os.close(fd)
        kv = kv_views(mapping, layout)
        export_state(state, kv)
        for rows in (slice(0, 1), slice(1, 3)):
            leaves = leaf_state(kv, batch.lengths, batch.next_positions, rows)
            here = slice(rows.start * 2, rows.stop * 2)
            out = suffix_forward(
                store.model, leaves, tokens[here], lengths[here], temperature=1.0, never_sampled=kit.NEVER
            )
            out.logprobs.sum().backward()  # type: ignore[no-untyped-call]
        whole = suffix_forward(store.model, reference, tokens, lengths, temperature=1.0, never_sampled=kit.NEVER)
        whole.logprobs.sum().backward()  # type: ignore[no-untyped-call]
        expected = (*reference.keys, *reference.values, reference.last_hidden)
        given = (*kv.d_keys, *kv.d_values, kv.d_last_hidden)
        assert all(torch.allclose(g, e.grad, rtol=1e-4, atol=1e-5) for g, e in zip(given, expected, strict=True))
        assert kv.d_keys[0].any()
        store.zero()
        prefix_backward(state, kv.d_keys, kv.d_values, kv.d_last_hidden)
        assert store.grads()["model.visual.patch_embed.proj.weight"].any()
        del kv, leaves, given, expected, out


def test_the_gradient_of_padded_keys_is_zero(kit: Any) -> None:
    store = kit.shared_store()
    batch = kit.batch(samples_of(kit))
    leaves = kit.leaves(prefix_forward(store.model, batch, grad=False))
    tokens, lengths = kit.responses([3] * 6, 8)
    out = suffix_forward(store.model, leaves, tokens, lengths, temperature=1.0, never_sampled=kit.NEVER)
    out.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert not leaves.keys[0].grad[0, :, 5:].any()
    assert not leaves.values[1].grad[0, :, 5:].any()
    assert leaves.keys[0].grad[0, :, :5].any()


def test_a_token_that_is_never_sampled_is_refused(kit: Any) -> None:
    store = kit.shared_store()
    state = prefix_forward(store.model, kit.batch(samples_of(kit)), grad=False)
    tokens, lengths = kit.responses([3] * 3, 8)
    tokens[1, 2] = kit.IMAGE
    with pytest.raises(EngineError, match=f"got token {kit.IMAGE}"):
        suffix_forward(store.model, state, tokens, lengths, temperature=1.0, never_sampled=kit.NEVER)
    shorter = torch.tensor([3, 2, 3])
    suffix_forward(store.model, state, tokens, shorter, temperature=1.0, never_sampled=kit.NEVER)
    with pytest.raises(EngineError, match="empty"):
        suffix_forward(store.model, state, tokens, shorter - 2, temperature=1.0, never_sampled=kit.NEVER)


def test_placeholders_that_do_not_match_the_media_are_refused(kit: Any) -> None:
    store, samples = kit.shared_store(), samples_of(kit)
    samples[1].ids[3] = 7
    with pytest.raises(DataError, match="13 placeholders, 14 features|17 placeholders, 18 features"):
        prefix_forward(store.model, kit.batch(samples), grad=False)
    samples[0].ids[0] = kit.IMAGE
    with pytest.raises(DataError, match="1 placeholders, 0 features"):
        prefix_forward(store.model, kit.batch(samples[:1]), grad=False)
