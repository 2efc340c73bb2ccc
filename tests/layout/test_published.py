"""Models as they are published: every form of their config.json, and as many parameters as the hub counts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from rollplex.errors import ModelError
from rollplex.layout.parameters import parameter_table
from rollplex.layout.published import QWEN2_5_VL
from rollplex.layout.shape import ModelShape, read_shape
from support.published import PUBLISHED, as_transformers_4, as_transformers_5

Folder = Callable[..., Path]
SMALL = ("Qwen2.5-VL-3B", "Qwen2.5-VL-7B", "Qwen2-VL-2B", "Qwen2-VL-7B")


def parameters(shape: ModelShape) -> int:
    table = parameter_table(shape, dtype="bfloat16", freeze_vision=False)
    return sum(prod(piece.hf_shape) for entry in table.entries for piece in entry.pieces)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_as_many_parameters_as_the_hub_counts_in_every_form(name: str, folder: Folder) -> None:
    config, count = PUBLISHED[name]
    shape = read_shape(folder(config))
    assert parameters(shape) == count
    assert (shape.architecture, shape.row_width, shape.head_dim) == (config["model_type"], 1176, 128)
    assert shape.tied is (name in {"Qwen2.5-VL-3B", "Qwen2-VL-2B"})
    for form in (as_transformers_4, as_transformers_5):
        assert read_shape(folder(form(config))) == shape


@pytest.mark.parametrize("size", QWEN2_5_VL)
def test_the_shapes_that_need_no_folder_are_those_of_the_published_files(size: str, folder: Folder) -> None:
    assert QWEN2_5_VL[size] == read_shape(folder(PUBLISHED[f"Qwen2.5-VL-{size}"].config))


@pytest.mark.parametrize("form", [dict, as_transformers_4, as_transformers_5])
@pytest.mark.parametrize("name", SMALL)
def test_transformers_reads_the_same_shapes_from_every_form(
    name: str, form: Callable[[Any], Any], folder: Folder
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    path = folder(form(PUBLISHED[name].config))
    with warnings.catch_warnings(), torch.device("meta"):
        config = AutoConfig.from_pretrained(path)
        model: Any = AutoModelForImageTextToText.from_config(config)  # type: ignore[no-untyped-call]
    table = parameter_table(read_shape(path), dtype="bfloat16", freeze_vision=False)
    pieces = {piece.hf_name: piece.hf_shape for entry in table.entries for piece in entry.pieces}
    assert pieces == {found: tuple(parameter.shape) for found, parameter in model.named_parameters()}


def test_a_qwen2_vl_has_no_windows_and_one_temporal_position_per_patch(folder: Folder) -> None:
    vision = read_shape(folder(PUBLISHED["Qwen2-VL-2B"].config)).vision
    assert (vision.hidden, vision.intermediate, vision.out_hidden) == (1280, 5120, 1536)
    assert (vision.window, vision.tokens_per_second) == (0, None)
    assert vision.full_attention_blocks == tuple(range(32))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"embed_dim": None}, "embed_dim"),
        ({"mlp_ratio": 0}, "mlp_ratio"),
        ({"hidden_size": 1280}, "hidden_size"),
        ({"num_heads": 15}, "num_heads"),
    ],
)
def test_an_unusable_vision_field_of_a_qwen2_vl_is_named(change: dict[str, Any], field: str, folder: Folder) -> None:
    config = PUBLISHED["Qwen2-VL-2B"].config
    with pytest.raises(ModelError) as caught:
        read_shape(folder({**config, "vision_config": {**config["vision_config"], **change}}))
    assert caught.value.where.endswith(f"vision_config.{field}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3_vl"}, "got model_type 'qwen3_vl'; needed qwen2_5_vl or qwen2_vl"),
        ({"quantization_config": {"quant_method": "awq"}}, "Quantized weights cannot be trained"),
        ({"rope_scaling": {"type": "dynamic", "mrope_section": [16, 24, 24]}}, "change with the length .*got dynamic"),
        ({"rope_scaling": {"rope_type": "longrope", "mrope_section": [16, 24, 24]}}, "got longrope"),
    ],
)
def test_what_cannot_be_trained_exactly_is_refused(change: dict[str, Any], message: str, folder: Folder) -> None:
    with pytest.raises(ModelError, match=message):
        read_shape(folder({**PUBLISHED["Qwen2.5-VL-3B"].config, **change}))


def test_yarn_as_the_published_models_recommend_it_is_read(folder: Folder) -> None:
    rope = {"type": "yarn", "mrope_section": [16, 24, 24], "factor": 4, "original_max_position_embeddings": 32768}
    config = PUBLISHED["Qwen2.5-VL-7B"].config
    assert read_shape(folder({**config, "rope_scaling": rope})) == read_shape(folder(config))
