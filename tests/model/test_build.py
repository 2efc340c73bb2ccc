"""The model over given storage: nothing copied, ties kept, padding untouched, refusals with names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollplex.errors import ModelError
from rollplex.layout.parameters import parameter_table
from rollplex.memory.tensors import padding
from rollplex.model.build import build
from rollplex.model.prefix import prefix_backward, prefix_forward
from rollplex.model.suffix import suffix_forward


def backward(kit: Any, store: Any) -> None:
    """One whole backward through prefix and suffix."""
    batch = kit.batch([kit.sample([3, ("image", (1, 4, 6)), 2], 0), kit.sample([9], 1)])
    state = prefix_forward(store.model, batch, grad=True)
    leaves = kit.leaves(state)
    tokens, lengths = kit.responses([3, 2, 4, 1], 2)
    out = suffix_forward(store.model, leaves, tokens, lengths, temperature=1.0, never_sampled=kit.NEVER)
    out.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    prefix_backward(state, [k.grad for k in leaves.keys], [v.grad for v in leaves.values], leaves.last_hidden.grad)


def inside(part: Tensor, whole: Tensor) -> bool:
    start = whole.data_ptr()
    return start <= part.data_ptr() < start + whole.nbytes


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_views_on_the_stored_ones(kit: Any, tied: bool) -> None:
    store = kit.shared_store("gpu", tied=tied)
    parameters = dict(store.model.named_parameters())
    assert parameters.keys() == {piece.hf_name for e in store.table.entries for piece in e.pieces}
    for name, parameter in parameters.items():
        entry, _ = store.table.by_hf_name(name)
        assert inside(parameter, store.views[entry.name])
        assert inside(parameter.grad, store.gradients[entry.name])
    assert (store.model.lm_head.weight is store.model.model.language_model.embed_tokens.weight) is tied


def test_a_backward_adds_into_the_arena_through_fused_and_padded_parameters(kit: Any) -> None:
    store = kit.store("gpu")
    before = {name: parameter.grad.data_ptr() for name, parameter in store.model.named_parameters()}
    backward(kit, store)
    once = {name: grad.clone() for name, grad in store.gradients.items()}
    backward(kit, store)
    for name, parameter in store.model.named_parameters():
        assert parameter.grad.data_ptr() == before[name]
    for entry in store.table.entries:
        assert once[entry.name].any(), entry.name
        assert torch.allclose(store.gradients[entry.name], 2 * once[entry.name], rtol=1e-4, atol=1e-4)
    down = store.model.model.visual.blocks[0].mlp.down_proj.weight
    assert (down.shape, down.stride(), down.grad.stride()) == ((64, 252), (256, 1), (256, 1))


def test_padding_stays_zero_in_weights_and_gradients(kit: Any) -> None:
    store = kit.store("gpu")
    backward(kit, store)
    for views in (store.views, store.gradients):
        gaps = padding(views, store.table)
        sizes = {name: sum(gap.numel() for gap in parts) for name, parts in gaps.items()}
        assert sizes["model.embed_tokens.weight"] == (448 - 435) * 256
        assert sizes["visual.blocks.0.mlp.down_proj.weight"] == 64 * 4
        assert sizes["visual.blocks.0.mlp.gate_up_proj.weight"] == 2 * 4 * 64
        assert not any(gap.any() for parts in gaps.values() for gap in parts)


def test_a_frozen_vision_tower_has_no_gradients_and_keeps_no_graph(kit: Any) -> None:
    store = kit.shared_store(frozen=True)
    for name, parameter in store.model.named_parameters():
        assert parameter.requires_grad is not name.startswith("model.visual.")
    assert not any(name.startswith("visual.") for name in store.gradients)
    backward(kit, store)


def test_without_gradients_no_parameter_needs_one(kit: Any) -> None:
    store = kit.shared_store()
    model: Any = build(store.folder, store.table, store.views, gradients=None, freeze_vision=False)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not prefix_forward(model, kit.batch([kit.sample([4], 0)]), grad=True).last_hidden.requires_grad


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotary_frequencies_are_transformers_own_in_float32(kit: Any, dtype: str) -> None:
    buffers = dict(kit.shared_store(dtype=dtype).model.named_buffers())
    expected = dict(kit.stock().named_buffers())
    assert buffers.keys() == expected.keys()
    for name, buffer in buffers.items():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, expected[name])


def test_the_model_is_in_evaluation_mode(kit: Any) -> None:
    assert not any(module.training for module in kit.shared_store().model.modules())


def test_its_own_forward_says_that_it_needs_a_context(kit: Any) -> None:
    model = kit.shared_store().model
    with pytest.raises(AssertionError, match="use prefix, suffix or decode"):
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)


def test_storage_of_another_shape_is_refused_by_name(kit: Any) -> None:
    store = kit.shared_store()
    table = parameter_table(kit.shared_store("gpu").shape, dtype="float32", freeze_vision=False)
    views = {e.name: torch.zeros(e.shape) for e in table.entries}
    with pytest.raises(ModelError, match=r"gate_proj.weight: a parameter has no storage of its shape; got \(252, 64\)"):
        build(store.folder, table, views, gradients=None, freeze_vision=False)


def test_the_other_setting_of_freeze_vision_is_refused(kit: Any) -> None:
    store = kit.shared_store()
    with pytest.raises(AssertionError, match="freeze_vision"):
        build(store.folder, store.table, store.views, gradients=None, freeze_vision=True)


def test_sliding_window_attention_is_refused(kit: Any, tmp_path: Path) -> None:
    store = kit.shared_store()
    shutil.copyfile(store.folder / "config.json", tmp_path / "config.json")
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="full_attention in every layer"):
        build(tmp_path, store.table, store.views, gradients=None, freeze_vision=False)
    with pytest.raises(ModelError, match="config.json: A model file cannot be read"):
        build(tmp_path / "nothing", store.table, store.views, gradients=None, freeze_vision=False)
