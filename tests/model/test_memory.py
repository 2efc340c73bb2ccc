"""What the passes hold, as predicted from shapes and as counted in the graph."""

from __future__ import annotations

from itertools import product
from typing import Any, cast

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ProcessGroup

from rollplex.layout.kv import KvLayout
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import plan
from rollplex.layout.parallel.rank import rank_shape
from rollplex.layout.parallel.training import gradient_plan
from rollplex.layout.vision import VisionShape
from rollplex.memory import predict
from rollplex.memory.tensors import DTYPES
from rollplex.model.build import build
from rollplex.model.decode import Decoder
from rollplex.model.logprob import forbidden_ids
from rollplex.model.measure import GraphMeter, ScratchMeter, storage_bytes
from rollplex.model.parallel.build import build_parallel
from rollplex.model.parallel.group import TensorGroup
from rollplex.model.parallel.views import shard_views
from rollplex.model.prefix import prefix_forward
from rollplex.model.suffix import suffix_forward
from rollplex.model.vision import vision_plan

PROMPTS: dict[str, list[list[Any]]] = {
    "one text": [[9]],
    "texts": [[30], [7], [19]],
    "one square image": [[3, ("image", (1, 4, 4)), 4]],
    "equal images": [[3, ("image", (1, 4, 4)), 4]] * 5,
    "images": [[2, ("image", (1, 4, 6)), ("image", (1, 10, 8))], [3, ("image", (1, 2, 2)), 2]],
    "video": [[2, ("video", (3, 6, 4), 1.5), 5], [40]],
}
MODELS = ["tiny", "gpu", "deep", "qwen2"]
BOUND = 0.01 if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 17) else 0.05
"""transformers 5.12 keeps cos and sin of the rope once per layer."""


def prefix(kit: Any, name: str, prompts: str, *, frozen: bool, dtype: str) -> Any:
    store = kit.shared_store(name, frozen=frozen, dtype=dtype)
    batch = kit.batch([kit.sample(parts, seed) for seed, parts in enumerate(PROMPTS[prompts])])
    return store, batch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_prefix_activations_are_predicted_within_the_bound(kit: Any, name: str, frozen: bool, dtype: str) -> None:
    for prompts in PROMPTS if dtype == "float32" else ["images"]:
        store, batch = prefix(kit, name, prompts, frozen=frozen, dtype=dtype)
        with GraphMeter() as meter:
            state = prefix_forward(store.model, batch, grad=True)
        held = meter.held_bytes((*state.keys, *state.values, state.last_hidden), excluding=store.model.parameters())
        said = predict.prefix_activation_bytes(
            store.shape, rows=batch.rows, tokens=batch.tokens, grids=batch.grids, freeze_vision=frozen, dtype=dtype
        )
        assert said == pytest.approx(held, rel=BOUND), prompts


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_what_fused_modules_keep_is_predicted_within_the_bound(kit: Any, name: str, frozen: bool) -> None:
    dtype = "bfloat16"
    for prompts in PROMPTS:
        store, batch = prefix(kit, name, prompts, frozen=frozen, dtype=dtype)
        model = build(
            store.folder, store.table, store.views, gradients=store.gradients, freeze_vision=frozen, fused=True
        )
        with GraphMeter() as meter:
            state = prefix_forward(model, batch, grad=True)
        held = meter.held_bytes((*state.keys, *state.values, state.last_hidden), excluding=model.parameters())
        said = predict.prefix_activation_bytes(
            store.shape,
            rows=batch.rows,
            tokens=batch.tokens,
            grids=batch.grids,
            freeze_vision=frozen,
            dtype=dtype,
            fused=True,
        )
        assert said == pytest.approx(held, rel=BOUND), prompts


class Mute(TensorGroup):
    """The first of several ranks, whose others add nothing."""

    def _wait(self, collective: Any) -> None: ...


def of_rank(kit: Any, store: Any, *, frozen: bool, fused: bool) -> Any:
    """The model of one of two ranks, over numbers of no meaning."""
    layout = TrainingLayout(degree=2)
    device = plan(store.table, store.shape, layout, RolloutLayout(degree=1)).devices[0]
    arena = gradient_plan(store.table, store.shape, layout).devices[0]
    rows = [
        torch.randn(one.storage.total_bytes // store.table.item_bytes).to(DTYPES[store.table.dtype]) * 0.02
        for one in (device, arena)
    ]
    return build_parallel(
        store.folder,
        store.shape,
        layout,
        {p.name: p for p in device.training},
        shard_views(rows[0], device.training),
        gradients=shard_views(rows[1], arena.training),
        group=Mute(rank=0, size=2, process_group=cast("ProcessGroup", object())),
        fused=fused,
    )


@pytest.mark.parametrize(("dtype", "fused"), [("float32", False), ("bfloat16", True)])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_rank_keeps_is_predicted_within_the_bound(kit: Any, frozen: bool, dtype: str, fused: bool) -> None:
    for prompts in ("texts", "images"):
        store, batch = prefix(kit, "gpu", prompts, frozen=frozen, dtype=dtype)
        model = of_rank(kit, store, frozen=frozen, fused=fused)
        with GraphMeter() as meter:
            state = prefix_forward(model, batch, grad=True)
        outside = (*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None))
        held = meter.held_bytes((*state.keys, *state.values, state.last_hidden), excluding=outside)
        said = predict.prefix_activation_bytes(
            rank_shape(store.shape, TrainingLayout(degree=2)),
            rows=batch.rows,
            tokens=batch.tokens,
            grids=batch.grids,
            freeze_vision=frozen,
            dtype=dtype,
            fused=fused,
        )
        assert said == pytest.approx(held, rel=0.05), prompts


@pytest.mark.parametrize(("dtype", "fused"), [("float32", False), ("bfloat16", False), ("float32", True)])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_inputs_of_layers_are_predicted_within_the_bound(
    kit: Any, name: str, frozen: bool, dtype: str, fused: bool
) -> None:
    """The meter sees what is saved; cos and sin, which every layer is given, checkpointing keeps by itself."""
    for prompts in PROMPTS:
        store, batch = prefix(kit, name, prompts, frozen=frozen, dtype=dtype)
        model = store.model
        if fused:
            given = {"gradients": store.gradients, "freeze_vision": frozen, "fused": True}
            model = build(store.folder, store.table, store.views, **given)
        with GraphMeter() as meter:
            state = prefix_forward(model, batch, grad=True, layers=True)
        outside = (*store.views.values(), *model.parameters())
        held = meter.held_bytes((*state.keys, *state.values, state.last_hidden), excluding=outside)
        held += batch.rows * batch.tokens * 2 * store.shape.head_dim * state.keys[0].element_size()
        if batch.grids and not frozen:
            held += sum(t * h * w for t, h, w in batch.grids) * 2 * 4 * store.shape.vision.head_dim
        of = {"rows": batch.rows, "tokens": batch.tokens, "grids": batch.grids, "freeze_vision": frozen}
        kept, largest = predict.prefix_layers_bytes(store.shape, **of, dtype=dtype, fused=fused)
        assert kept == pytest.approx(held, rel=2 * BOUND), prompts
        everything = predict.prefix_activation_bytes(store.shape, **of, dtype=dtype, fused=fused)
        assert kept + largest <= everything
        assert largest >= (everything - kept) / (store.shape.layers + store.shape.vision.depth)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("name", "dtype"), [("tiny", "float32"), ("gpu", "bfloat16"), ("deep", "float64")])
def test_the_suffix_graph_and_its_scratch_are_predicted_within_the_bound(
    kit: Any, name: str, dtype: str, tied: bool
) -> None:
    store = kit.shared_store(name, tied=tied, dtype=dtype)
    batch = kit.batch([kit.sample(parts, seed) for seed, parts in enumerate(PROMPTS["texts"])])
    state = kit.leaves(prefix_forward(store.model, batch, grad=False))
    known = (*store.model.parameters(), *state.keys, *state.values, state.last_hidden)
    shared = forbidden_ids(kit.NEVER, kit.VOCAB, torch.device("cpu")).nbytes
    for lengths, entropy in product([(5, 5), (9, 2, 4, 1), (1, 1, 1), (16, 30)], [False, True]):
        tokens, sizes = kit.responses(lengths * batch.rows, 1)
        with GraphMeter() as meter, ScratchMeter() as scratch:
            out = suffix_forward(
                store.model, state, tokens, sizes, temperature=1.0, never_sampled=kit.NEVER, entropy=entropy
            )
            kept = (out.logprobs,) if out.entropy is None else (out.logprobs, out.entropy)
            held = meter.held_bytes(kept, excluding=known)
            sum(part.sum() for part in kept).backward()  # type: ignore[union-attr]
        said = predict.suffix_saved_bytes(
            store.shape,
            prompts=batch.rows,
            prefix_tokens=batch.tokens,
            lengths=lengths * batch.rows,
            entropy=entropy,
            dtype=dtype,
        )
        assert said == pytest.approx(held - shared, rel=BOUND)
        rows = predict.scored_rows(batch.rows, lengths * batch.rows)
        assert scratch.peak_bytes == predict.logits_bytes(store.shape, rows=rows, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_reference_and_rollout_kv_are_predicted_exactly(kit: Any, name: str, dtype: str) -> None:
    store, batch = prefix(kit, name, "images", frozen=False, dtype=dtype)
    state = prefix_forward(store.model, batch, grad=False)
    said = predict.kv_bytes(store.shape, rows=batch.rows, tokens=batch.tokens, dtype=dtype)
    assert said == storage_bytes((*state.keys, *state.values, state.last_hidden)) == state.size_bytes
    decoder = Decoder(store.model, state, 3, 8)
    rollout = predict.rollout_kv_bytes(
        store.shape, rows=batch.rows, tokens=batch.tokens, samples=3, max_new_tokens=8, dtype=dtype
    )
    assert rollout == decoder.kv_bytes


def test_an_actor_unit_segment_is_as_large_as_its_layout(kit: Any) -> None:
    shape = kit.shared_store("gpu").shape
    layout = KvLayout(shape, 3, 17, "bfloat16")
    assert predict.kv_segment_bytes(shape, rows=3, tokens=17, dtype="bfloat16") == layout.total_bytes


def test_logits_are_made_in_chunks_of_the_stated_size(kit: Any) -> None:
    shape = kit.shared_store().shape
    one_row = 2 * 4 * shape.vocab
    assert predict.logits_bytes(shape, rows=10, dtype="float32", chunk_bytes=3 * 4 * shape.vocab) == 3 * one_row
    assert predict.logits_bytes(shape, rows=2, dtype="bfloat16", chunk_bytes=3 * 4 * shape.vocab) == 2 * one_row
    assert predict.logits_bytes(shape, rows=2, dtype="float32", chunk_bytes=1) == one_row


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 9).map(lambda n: 2 * n), st.integers(1, 9).map(lambda n: 2 * n)),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([28, 56, 112]),
)
def test_sequence_lengths_are_those_of_transformers(grids: list[tuple[int, int, int]], window: int) -> None:
    vision = VisionShape(
        depth=2,
        hidden=64,
        intermediate=64,
        heads=2,
        patch=14,
        temporal_patch=2,
        merge=2,
        in_channels=3,
        window=window,
        full_attention_blocks=(1,),
        out_hidden=64,
        tokens_per_second=2,
    )
    plan = vision_plan(tuple(grids), 2, window, 14, torch.device("cpu"))
    assert predict.sequence_lengths(grids, vision, windowed=True) == set(plan.windows.lengths)
    assert predict.sequence_lengths(grids, vision, windowed=False) == set(plan.full.lengths)
