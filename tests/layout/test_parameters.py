"""The parameter table against transformers' and SGLang's parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from rollplex.errors import ModelError
from rollplex.layout.parameters import (
    ALIGN_BYTES,
    HEADER_BYTES,
    ParameterTable,
    canonical_text,
    gradient_table,
    parameter_table,
    reference_table,
)
from rollplex.layout.shape import ModelShape, read_shape

Config = dict[str, Any]
Folder = Callable[..., Path]


@pytest.fixture
def shape(tiny: Config, folder: Folder) -> ModelShape:
    return read_shape(folder(tiny))


@pytest.fixture
def table(shape: ModelShape) -> ParameterTable:
    return parameter_table(shape, dtype="float32", freeze_vision=False)


def hf_parameters(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model that transformers really builds, without memory for its numbers."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_pretrained(folder))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def change(config: Config, case: str) -> Config:
    match case:
        case "tied":
            config["tie_word_embeddings"] = True
        case "no padding":
            config["vocab_size"] = 512
            config["vision_config"]["intermediate_size"] = 48
        case "every head its own key":
            config["num_key_value_heads"] = 6
        case "other patches":
            config["vision_config"] |= {"patch_size": 6, "temporal_patch_size": 1, "spatial_merge_size": 3}
            config["vision_config"] |= {"in_channels": 4}
        case "7b":
            config |= {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28}
            config |= {"num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 152064}
            config |= {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
            config["vision_config"] |= {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420}
            config["vision_config"] |= {"num_heads": 16, "out_hidden_size": 3584}
    return config


CASES = ["untied", "tied", "no padding", "every head its own key", "other patches", "7b"]


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_of_transformers_lies_in_the_table_once_with_its_shape(
    tiny: Config, folder: Folder, case: str
) -> None:
    model_folder = folder(change(tiny, case))
    table = parameter_table(read_shape(model_folder), dtype="bfloat16", freeze_vision=False)
    pieces = [piece for entry in table.entries for piece in entry.pieces]
    assert len({piece.hf_name for piece in pieces}) == len(pieces)
    assert {piece.hf_name: piece.hf_shape for piece in pieces} == hf_parameters(model_folder)


@pytest.mark.parametrize("case", CASES)
def test_pieces_and_padding_make_up_each_stored_parameter(tiny: Config, folder: Folder, case: str) -> None:
    shape = read_shape(folder(change(tiny, case)))
    for entry in parameter_table(shape, dtype="float32", freeze_vision=False).entries:
        row = 0
        for piece in entry.pieces:
            assert piece.rows[0] >= row, "pieces overlap"
            row = piece.rows[1]
            cols = piece.cols or (0, prod(entry.shape[1:]))
            held = (piece.rows[1] - piece.rows[0]) * (cols[1] - cols[0])
            assert held == prod(piece.hf_shape)
            assert piece.cols is None or (len(entry.shape) == 2 and piece.cols[1] <= entry.shape[1])
        assert row <= entry.shape[0]
        pads = prod(entry.shape) - sum(prod(piece.hf_shape) for piece in entry.pieces)
        assert pads == padding_of(entry.name, shape)


def padding_of(name: str, shape: ModelShape) -> int:
    """SGLang's padding in numbers, written down a second time."""
    vision = shape.vision
    wide = (8 - vision.intermediate % 8) % 8
    match name.split("."):
        case ["model", "embed_tokens", "weight"] | ["lm_head", "weight"]:
            return (64 - shape.vocab % 64) % 64 * shape.hidden
        case ["visual", "blocks", _, "mlp", "gate_up_proj", "weight"]:
            return 2 * wide * vision.hidden
        case ["visual", "blocks", _, "mlp", "gate_up_proj", "bias"]:
            return 2 * wide
        case ["visual", "blocks", _, "mlp", "down_proj", "weight"]:
            return wide * vision.hidden
        case _:
            return 0


def test_names_and_shapes_are_those_that_sglang_has(table: ParameterTable) -> None:
    # SGLang 0.5.17's named_parameters() at TP = 1, hidden 48, 6 heads of 8, 2 KV heads, MLP 100, vocabulary 450;
    # vision hidden 16, MLP 42.
    layer = {
        "self_attn.qkv_proj.weight": (80, 48),
        "self_attn.qkv_proj.bias": (80,),
        "self_attn.o_proj.weight": (48, 48),
        "mlp.gate_up_proj.weight": (200, 48),
        "mlp.down_proj.weight": (48, 100),
        "input_layernorm.weight": (48,),
        "post_attention_layernorm.weight": (48,),
    }
    block = {
        "norm1.weight": (16,),
        "norm2.weight": (16,),
        "attn.qkv_proj.weight": (48, 16),
        "attn.qkv_proj.bias": (48,),
        "attn.proj.weight": (16, 16),
        "attn.proj.bias": (16,),
        "mlp.gate_up_proj.weight": (96, 16),
        "mlp.gate_up_proj.bias": (96,),
        "mlp.down_proj.weight": (16, 48),
        "mlp.down_proj.bias": (16,),
    }
    expected: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (512, 48)}
    for n in range(2):
        expected |= {f"model.layers.{n}.{name}": dims for name, dims in layer.items()}
    expected |= {"model.norm.weight": (48,), "lm_head.weight": (512, 48)}
    expected |= {"visual.patch_embed.proj.weight": (16, 3, 2, 14, 14)}
    for n in range(2):
        expected |= {f"visual.blocks.{n}.{name}": dims for name, dims in block.items()}
    expected |= {"visual.merger.ln_q.weight": (16,)}
    expected |= {"visual.merger.mlp.0.weight": (64, 64), "visual.merger.mlp.0.bias": (64,)}
    expected |= {"visual.merger.mlp.2.weight": (48, 64), "visual.merger.mlp.2.bias": (48,)}
    assert [(entry.name, entry.shape) for entry in table.entries] == list(expected.items())


def test_fused_parameters_hold_their_parts_in_sglang_s_order(table: ParameterTable) -> None:
    def ranges(name: str) -> list[tuple[str, tuple[int, int]]]:
        return [(piece.hf_name.split(".")[-2], piece.rows) for piece in table.by_name(name).pieces]

    for kind in ("weight", "bias"):
        qkv = [("q_proj", (0, 48)), ("k_proj", (48, 64)), ("v_proj", (64, 80))]
        assert ranges(f"model.layers.0.self_attn.qkv_proj.{kind}") == qkv
        padded = [("gate_proj", (0, 42)), ("up_proj", (48, 90))]
        assert ranges(f"visual.blocks.1.mlp.gate_up_proj.{kind}") == padded
    assert ranges("model.layers.1.mlp.gate_up_proj.weight") == [("gate_proj", (0, 100)), ("up_proj", (100, 200))]
    (down,) = table.by_name("visual.blocks.0.mlp.down_proj.weight").pieces
    assert (down.rows, down.cols) == ((0, 16), (0, 42))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_entries_follow_each_other_aligned_behind_the_header(shape: ModelShape, dtype: str) -> None:
    table = parameter_table(shape, dtype=dtype, freeze_vision=False)
    end = HEADER_BYTES
    for entry in table.entries:
        assert entry.offset % ALIGN_BYTES == 0
        assert 0 <= entry.offset - end < ALIGN_BYTES
        assert entry.size_bytes == prod(entry.shape) * {"float32": 4, "bfloat16": 2, "float64": 8}[dtype]
        end = entry.offset + entry.size_bytes
    assert 0 <= table.total_bytes - end < ALIGN_BYTES
    assert table.total_bytes % ALIGN_BYTES == 0


def test_the_published_3b_is_as_large_as_its_parameters(flat_3b: Config, folder: Folder) -> None:
    table = parameter_table(read_shape(folder(flat_3b)), dtype="bfloat16", freeze_vision=False)
    numbers = sum(prod(piece.hf_shape) for entry in table.entries for piece in entry.pieces)
    assert numbers == 3_754_622_976  # parameters of Qwen2.5-VL-3B-Instruct, tied
    padding = 32 * (2 * 4 * 1280 + 2 * 4 + 4 * 1280)
    assert sum(prod(entry.shape) for entry in table.entries) == numbers + padding
    assert 0 < table.total_bytes - 2 * (numbers + padding) < HEADER_BYTES + ALIGN_BYTES * len(table.entries)


def test_a_tied_head_is_the_embedding(tiny: Config, folder: Folder) -> None:
    tied = parameter_table(
        read_shape(folder({**tiny, "tie_word_embeddings": True})), dtype="float32", freeze_vision=False
    )
    assert [entry.name for entry in tied.entries if entry.tied] == ["model.embed_tokens.weight"]
    (piece,) = tied.by_name("model.embed_tokens.weight").pieces
    assert piece.hf_name == "model.language_model.embed_tokens.weight"
    with pytest.raises(KeyError):
        tied.by_name("lm_head.weight")


def test_an_untied_head_is_not(table: ParameterTable) -> None:
    assert not any(entry.tied for entry in table.entries)
    entry, piece = table.by_hf_name("lm_head.weight")
    assert (entry.name, piece.rows) == ("lm_head.weight", (0, 450))


def test_norms_and_biases_do_not_decay(table: ParameterTable) -> None:
    kept = {entry.name for entry in table.entries if not entry.decay}
    assert kept == {
        entry.name for entry in table.entries if "norm" in entry.name or ".ln_q" in entry.name or "bias" in entry.name
    }


def test_a_frozen_tower_has_neither_gradients_nor_a_reference_of_its_own(shape: ModelShape) -> None:
    table = parameter_table(shape, dtype="bfloat16", freeze_vision=True)
    assert {entry.tower for entry in table.entries if entry.trainable} == {"text"}
    for derived in (gradient_table(table), reference_table(table)):
        assert [entry.name for entry in derived.entries] == [e.name for e in table.entries if e.tower == "text"]
        assert derived.entries[0].offset == 0
        assert derived.header_bytes == 0
        assert derived.dtype == "bfloat16"
        assert [e.pieces for e in derived.entries] == [table.by_name(e.name).pieces for e in derived.entries]
    trained = parameter_table(shape, dtype="bfloat16", freeze_vision=False)
    assert len(gradient_table(trained).entries) == len(trained.entries)
    assert [e.offset for e in trained.entries] == [e.offset for e in table.entries]


def test_gradients_may_be_finer_than_weights(shape: ModelShape) -> None:
    table = parameter_table(shape, dtype="bfloat16", freeze_vision=True)
    gradients = gradient_table(table, dtype="float32")
    assert gradients.dtype == "float32"
    assert gradients.entries[0].size_bytes == 2 * table.entries[0].size_bytes


def test_the_hash_is_of_the_canonical_text_and_sees_every_field(shape: ModelShape, table: ParameterTable) -> None:
    text = canonical_text(table)
    assert table.hash == hashlib.sha256(text.encode()).hexdigest()
    assert parameter_table(shape, dtype="float32", freeze_vision=False).hash == table.hash
    entry = table.by_name("visual.blocks.0.mlp.down_proj.weight")
    piece = entry.pieces[0]
    others = [
        replace(entry, name="x"),
        replace(entry, shape=(48, 16)),
        replace(entry, offset=0),
        replace(entry, size_bytes=0),
        replace(entry, tower="text"),
        replace(entry, trainable=False),
        replace(entry, decay=False),
        replace(entry, tied=True),
        replace(entry, pieces=()),
        replace(entry, pieces=(replace(piece, hf_name="x"),)),
        replace(entry, pieces=(replace(piece, hf_shape=(42, 16)),)),
        replace(entry, pieces=(replace(piece, rows=(0, 15)),)),
        replace(entry, pieces=(replace(piece, cols=(6, 48)),)),
        replace(entry, pieces=(replace(piece, cols=None),)),
    ]
    tables = [replace(table, entries=tuple(o if e is entry else e for e in table.entries)) for o in others]
    tables += [replace(table, dtype="float64"), replace(table, header_bytes=0), replace(table, total_bytes=0)]
    tables += [replace(table, entries=table.entries[::-1]), parameter_table(shape, dtype="float32", freeze_vision=True)]
    assert len({t.hash for t in (table, *tables)}) == 1 + len(tables)


def test_the_hash_of_the_layout_does_not_change_by_accident(table: ParameterTable) -> None:
    # Two versions of the code with the same hash must mean the same bytes. Change this only with the layout.
    assert table.hash == "5194682f878787a5f1287c397b876ef00bb39a03c39b9843098cd96fabb6a2a7"


def test_a_dtype_that_weights_cannot_have_is_refused(shape: ModelShape) -> None:
    with pytest.raises(ModelError, match="float16"):
        parameter_table(shape, dtype="float16", freeze_vision=False)
