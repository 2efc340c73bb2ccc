"""Tensors over segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch

from rollplex.errors import SegmentError
from rollplex.layout.kv import KvLayout
from rollplex.layout.optimizer import optimizer_table
from rollplex.layout.parameters import ParameterTable, gradient_table, parameter_table, reference_table
from rollplex.layout.shape import ModelShape
from rollplex.memory import Mapping
from rollplex.memory.tensors import DTYPES, hf_views, kv_views, optimizer_views, padding, require_mapped, tensor, views

NewMapping: TypeAlias = Callable[[int], Mapping]


@pytest.fixture
def mapping(new_mapping: NewMapping, table: ParameterTable) -> Mapping:
    return new_mapping(table.total_bytes)


def test_a_tensor_is_the_segment_itself(mapping: Mapping) -> None:
    numbers = tensor(mapping, 4096, (2, 3), torch.float64)
    assert numbers.is_contiguous()
    numbers.copy_(torch.arange(6.0).view(2, 3))
    assert mapping.read(4096, 48) == torch.arange(6, dtype=torch.float64).numpy().tobytes()
    mapping.write(4096 + 8 * 4, b"\0" * 8)
    assert numbers.tolist() == [[0, 1, 2], [3, 0, 5]]
    assert tensor(mapping, 8, (), torch.int64).shape == ()
    assert tensor(mapping, 8, (0, 3), torch.int64).shape == (0, 3)


def test_a_copy_of_a_weight_is_told_from_the_mapped_one(mapping: Mapping, table: ParameterTable) -> None:
    mine = hf_views(views(mapping, table), table)
    require_mapped(mapping, mine)
    name = list(mine)[3]
    mine[name] = mine[name].clone()
    with pytest.raises(SegmentError, match=f"{name}: A parameter is not in the segment"):
        require_mapped(mapping, mine)


def test_a_tensor_keeps_the_mapping_open(mapping: Mapping) -> None:
    part = tensor(mapping, 4096, (100,), torch.bfloat16)[10:].view(9, 10).t()
    with pytest.raises(SegmentError, match="looks at it"):
        mapping.close()
    part.fill_(1)
    del part
    mapping.close()
    assert mapping.closed


def test_tensors_outside_or_across_numbers_are_refused(mapping: Mapping) -> None:
    with pytest.raises(SegmentError, match="aligned"):
        tensor(mapping, 4098, (1,), torch.float32)
    with pytest.raises(SegmentError, match="outside"):
        tensor(mapping, mapping.size_bytes - 4, (2,), torch.float32)


def test_views_have_the_stored_shapes_at_the_table_s_offsets(mapping: Mapping, table: ParameterTable) -> None:
    stored = views(mapping, table)
    assert list(stored) == [entry.name for entry in table.entries]
    for number, entry in enumerate(table.entries):
        view = stored[entry.name]
        assert (tuple(view.shape), view.dtype, view.is_contiguous()) == (entry.shape, torch.float32, True)
        view.fill_(number)
    for number, entry in enumerate(table.entries):
        content = bytearray(mapping.read(entry.offset, entry.size_bytes))
        assert set(torch.frombuffer(content, dtype=torch.float32).tolist()) == {float(number)}


def test_pieces_fill_their_stored_parameter_and_leave_exactly_the_padding(
    mapping: Mapping, table: ParameterTable
) -> None:
    stored = views(mapping, table)
    for number, view in enumerate(hf_views(stored, table).values(), start=1):
        assert not view.any(), "two pieces overlap"
        view.fill_(number)
    for entry in table.entries:
        gaps = padding(stored, table)[entry.name]
        assert all(not gap.any() for gap in gaps)
        assert sum(gap.numel() for gap in gaps) == int((stored[entry.name] == 0).sum())
        for gap in gaps:
            gap.fill_(-1)
        assert (stored[entry.name] != 0).all()


def test_fused_and_padded_parameters_are_views_of_the_right_rows_and_columns(
    mapping: Mapping, table: ParameterTable
) -> None:
    stored = views(mapping, table)
    for view in stored.values():
        view.copy_(torch.arange(view.numel(), dtype=torch.float32).view(view.shape))
    hf = hf_views(stored, table)
    qkv = stored["model.layers.1.self_attn.qkv_proj.weight"]
    attention = "model.language_model.layers.1.self_attn"
    assert torch.equal(torch.cat([hf[f"{attention}.{h}_proj.weight"] for h in "qkv"]), qkv)
    bias = stored["visual.blocks.0.mlp.gate_up_proj.bias"]
    assert hf["model.visual.blocks.0.mlp.gate_proj.bias"].tolist() == bias[:20].tolist()
    assert hf["model.visual.blocks.0.mlp.up_proj.bias"].tolist() == bias[24:44].tolist()
    down = hf["model.visual.blocks.0.mlp.down_proj.weight"]
    assert (down.shape, down.stride()) == ((16, 20), (24, 1))
    assert torch.equal(down, stored["visual.blocks.0.mlp.down_proj.weight"][:, :20])
    assert hf["lm_head.weight"].shape == (70, 24)
    assert all(view.is_contiguous() for name, view in hf.items() if "visual.blocks.0.mlp.down_proj" not in name)


def test_reference_and_actor_together_give_every_parameter(
    new_mapping: NewMapping, mapping: Mapping, shape: ModelShape
) -> None:
    table = parameter_table(shape, dtype="float32", freeze_vision=True)
    reference = reference_table(table)
    theirs = new_mapping(reference.total_bytes)
    merged = {**views(mapping, table), **views(theirs, reference)}
    hf = hf_views(merged, table)
    hf["lm_head.weight"].fill_(1)
    hf["model.visual.merger.ln_q.weight"].fill_(2)
    assert tensor(theirs, reference.by_name("lm_head.weight").offset, (1,), torch.float32).item() == 1
    assert tensor(mapping, table.by_name("lm_head.weight").offset, (1,), torch.float32).item() == 0
    assert tensor(mapping, table.by_name("visual.merger.ln_q.weight").offset, (1,), torch.float32).item() == 2


def test_gradients_have_the_parameters_pieces(new_mapping: NewMapping, table: ParameterTable) -> None:
    gradients = gradient_table(table)
    mapping = new_mapping(gradients.total_bytes)
    assert [view.shape for view in hf_views(views(mapping, gradients), gradients).values()] == [
        piece.hf_shape for entry in table.entries for piece in entry.pieces
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefix_blocks_are_disjoint_and_the_gradients_are_zeroed_as_one(
    new_mapping: NewMapping, shape: ModelShape, dtype: str
) -> None:
    layout = KvLayout(shape, 2, 7, dtype)
    mapping = new_mapping(layout.total_bytes)
    kv = kv_views(mapping, layout)
    forward = [*kv.keys, *kv.values, kv.last_hidden]
    backward = [*kv.d_keys, *kv.d_values, kv.d_last_hidden]
    for number, view in enumerate([*forward, *backward], start=1):
        assert not view.any()
        view.fill_(number)
    assert all(view.shape == (2, shape.kv_heads, 7, shape.head_dim) for view in [*kv.keys, *kv.d_values])
    assert kv.last_hidden.shape == kv.d_last_hidden.shape == (2, shape.hidden)
    kv.gradients.zero_()
    assert not any(view.any() for view in backward)
    assert all((view == number).all() for number, view in enumerate(forward, start=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_optimizer_states_are_disjoint_and_of_the_stored_shapes(
    new_mapping: NewMapping, shape: ModelShape, dtype: str
) -> None:
    table = parameter_table(shape, dtype=dtype, freeze_vision=True)
    states = optimizer_table(table, name="adamw", momentum=0.9)
    mapping = new_mapping(states.total_bytes)
    optimizer = optimizer_views(mapping, states)
    optimizer.step.fill_(-1)
    assert ("master" in optimizer.states) == (dtype == "bfloat16")
    for by_name in optimizer.states.values():
        assert {name: tuple(view.shape) for name, view in by_name.items()} == {
            entry.name: entry.shape for entry in table.trainable_entries
        }
        for view in by_name.values():
            assert not view.any()
            view.fill_(1)
    assert optimizer.step.item() == -1


def test_a_segment_without_room_is_refused(new_mapping: NewMapping, shape: ModelShape, table: ParameterTable) -> None:
    small = new_mapping(100)
    for attempt in (
        lambda: views(small, table),
        lambda: kv_views(small, KvLayout(shape, 1, 1, "float32")),
        lambda: optimizer_views(small, optimizer_table(table, name="sgd", momentum=0.0)),
    ):
        with pytest.raises(SegmentError, match="smaller"):
            attempt()
