"""Along which dimension each parameter is split."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from rollplex.layout.parallel.split import Split, splits
from rollplex.layout.parameters import parameter_table
from rollplex.layout.published import QWEN2_5_VL
from rollplex.layout.shape import ModelShape
from support.layouts import shapes
from support.slices import small_shape


def by_name(shape: ModelShape) -> dict[str, Split]:
    return {s.entry.name: s for s in splits(parameter_table(shape, dtype="bfloat16", freeze_vision=False), shape)}


@given(shape=shapes())
def test_parts_make_up_the_stored_parameter_along_its_axis(shape: ModelShape) -> None:
    for split in by_name(shape).values():
        along = 1 if split.axis == "columns" else 0
        assert sum(part.size for part in split.parts) == split.entry.shape[along]
        assert all(0 < part.real <= part.size for part in split.parts)
        assert split.local_shape(split.entry.shape[along]) == split.entry.shape
        assert split.numbers(split.entry.shape[along]) * 2 == split.entry.size_bytes


def test_first_matrices_are_split_by_rows_second_ones_by_columns_and_the_rest_not_at_all() -> None:
    axes = {name.removeprefix("visual.blocks.0."): split.axis for name, split in by_name(QWEN2_5_VL["7B"]).items()}
    assert axes["model.embed_tokens.weight"] == axes["lm_head.weight"] == "rows"
    assert axes["attn.qkv_proj.bias"] == axes["mlp.gate_up_proj.bias"] == axes["visual.merger.mlp.0.bias"] == "rows"
    assert axes["attn.proj.weight"] == axes["mlp.down_proj.weight"] == axes["visual.merger.mlp.2.weight"] == "columns"
    assert axes["model.layers.27.self_attn.o_proj.weight"] == "columns"
    whole = {"attn.proj.bias", "mlp.down_proj.bias", "norm1.weight", "visual.merger.mlp.2.bias", "model.norm.weight"}
    assert {axes[name] for name in (*whole, "visual.patch_embed.proj.weight", "visual.merger.ln_q.weight")} == {"whole"}


def test_padding_belongs_to_the_part_that_it_is_behind() -> None:
    found = by_name(QWEN2_5_VL["3B"])
    gate, up = found["visual.blocks.0.mlp.gate_up_proj.weight"].parts
    assert (gate.name, gate.size, gate.real) == ("model.visual.blocks.0.mlp.gate_proj.weight", 3424, 3420)
    assert (up.size, up.real) == (3424, 3420)
    (down,) = found["visual.blocks.0.mlp.down_proj.weight"].parts
    assert (down.size, down.real) == (3424, 3420)


def test_k_and_v_say_how_many_heads_ranks_may_share_and_the_vision_tower_has_none_to_share() -> None:
    found = by_name(QWEN2_5_VL["3B"])
    assert [p.shared_heads for p in found["model.layers.0.self_attn.qkv_proj.weight"].parts] == [0, 2, 2]
    vision = found["visual.blocks.0.attn.qkv_proj.weight"].parts
    assert [p.shared_heads for p in vision] == [0, 0, 0]
    assert [p.name for p in vision] == [f"model.visual.blocks.0.attn.qkv.weight:{label}" for label in "qkv"]


def test_an_entry_without_a_rule_is_an_error() -> None:
    shape = small_shape()
    table = parameter_table(shape, dtype="bfloat16", freeze_vision=False)
    other = replace(table, entries=(replace(table.entries[0], name="model.layers.0.mlp.router.weight"),))
    with pytest.raises(KeyError, match="router"):
        splits(other, shape)
