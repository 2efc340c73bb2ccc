"""Counting what a graph holds."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from rollplex.model.measure import GraphMeter, ScratchMeter, note_scratch, storage_bytes
from rollplex.model.prefix import prefix_backward, prefix_forward


def test_a_storage_counts_once_whatever_views_are_saved() -> None:
    x = torch.randn(10, requires_grad=True)
    with GraphMeter() as meter:
        y = x * 2
        z = (y * y).sum() + (y.view(2, 5) ** 2).sum()
    assert meter.held_bytes() == 40
    assert meter.held_bytes([x], excluding=[y]) == 40
    assert meter.held_bytes(excluding=[y]) == 0
    z.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.equal(x.grad, 16 * x)


def test_what_the_graph_has_let_go_of_does_not_count() -> None:
    x = torch.randn(10, requires_grad=True)
    with GraphMeter() as meter:
        y = (x * 2).exp()
        z = (x * 3).exp()
        del z
    assert meter.held_bytes() == 40
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert meter.held_bytes() == 0


def test_nothing_counts_outside_the_block_or_without_gradients() -> None:
    x = torch.randn(10, requires_grad=True)
    with GraphMeter() as meter, torch.no_grad():
        (x * 2).exp()
    y = x.exp()
    assert meter.held_bytes() == 0
    assert meter.held_bytes([y]) == 40


def test_a_view_counts_the_whole_storage_behind_it() -> None:
    whole = torch.zeros(100, dtype=torch.float64)
    assert storage_bytes([whole[:3], whole[50:]]) == 800
    assert storage_bytes([whole[:3]], excluding=[whole[90:]]) == 0


def test_scratch_is_the_most_that_was_alive_at_once() -> None:
    note_scratch(torch.zeros(1000))
    with ScratchMeter() as meter:
        note_scratch(torch.zeros(10), torch.zeros(5))
        note_scratch(torch.zeros(3))
    note_scratch(torch.zeros(1000))
    assert meter.peak_bytes == 60


def test_gradients_are_the_same_with_a_meter(kit: Any) -> None:
    store = kit.shared_store()
    batch = kit.batch([kit.sample([3, ("image", (1, 4, 6)), 2], 0), kit.sample([9], 1)])
    grads = []
    for meter in (GraphMeter(), nullcontext()):
        store.zero()
        with meter:
            state = prefix_forward(store.model, batch, grad=True)
        prefix_backward(state, state.keys, state.values, state.last_hidden)
        grads.append(store.grads())
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])
    assert grads[0]["model.visual.patch_embed.proj.weight"].any()
