"""Reading shapes from model folders."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollplex.errors import ModelError
from rollplex.layout.shape import ModelShape, media_ids, read_shape
from rollplex.layout.vision import VisionShape

Config = dict[str, Any]
Folder = Callable[..., Path]

SHAPE_3B = ModelShape(
    hidden=2048,
    layers=36,
    heads=16,
    kv_heads=2,
    head_dim=128,
    intermediate=11008,
    vocab=151936,
    tied=True,
    mrope_section=(16, 24, 24),
    rope_theta=1e6,
    rms_eps=1e-6,
    vision=VisionShape(
        depth=32,
        hidden=1280,
        intermediate=3420,
        heads=16,
        patch=14,
        temporal_patch=2,
        merge=2,
        in_channels=3,
        window=112,
        full_attention_blocks=(7, 15, 23, 31),
        out_hidden=2048,
        tokens_per_second=2,
    ),
    image_id=151655,
    video_id=151656,
    vision_start_id=151652,
    vision_end_id=151653,
    vision_pad_id=151654,
    pad_id=151643,
    eos_ids=(151645, 151643),
)


def test_the_flat_form_of_the_published_3b(flat_3b: Config, generation_3b: Config, folder: Folder) -> None:
    shape = read_shape(folder(flat_3b, generation_3b))
    assert shape == SHAPE_3B
    assert shape.row_width == 1176
    assert shape.vision.head_dim == 80
    assert shape.vision.merger_width == 5120


@pytest.mark.parametrize("which", ["flat_3b", "tiny"])
def test_what_transformers_saves_reads_the_same_as_what_it_loaded(
    request: pytest.FixtureRequest, which: str, folder: Folder, tmp_path: Path
) -> None:
    from transformers import Qwen2_5_VLConfig

    flat = request.getfixturevalue(which)
    before = read_shape(folder(flat))
    config: Any = Qwen2_5_VLConfig.from_pretrained(tmp_path)
    with warnings.catch_warnings():
        config.save_pretrained(tmp_path / "saved")
    after = read_shape(tmp_path / "saved")
    assert after == before
    text, vision = config.text_config, config.vision_config
    assert (after.hidden, after.layers, after.vocab) == (text.hidden_size, text.num_hidden_layers, text.vocab_size)
    assert (after.rope_theta, list(after.mrope_section)) == (
        text.rope_parameters["rope_theta"],
        text.rope_parameters["mrope_section"],
    )
    assert after.tied == config.tie_word_embeddings
    assert after.rms_eps == text.rms_norm_eps
    assert (after.vision.window, after.vision.tokens_per_second) == (vision.window_size, vision.tokens_per_second)


def test_the_nested_form_of_transformers_4_reads_the_same(flat_3b: Config, folder: Folder) -> None:
    text_fields = [
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "num_hidden_layers",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "vocab_size",
        "eos_token_id",
        "tie_word_embeddings",
    ]
    expected = read_shape(folder(flat_3b))
    text = {name: flat_3b.pop(name) for name in text_fields}
    assert read_shape(folder({**flat_3b, "text_config": text})) == expected


def test_defaults_are_those_of_transformers(tiny: Config, folder: Folder, tmp_path: Path) -> None:
    from transformers import Qwen2_5_VLConfig

    for name in ("num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings"):
        del tiny[name]
    for name in (
        "patch_size",
        "spatial_merge_size",
        "window_size",
        "tokens_per_second",
        "temporal_patch_size",
        "fullatt_block_indexes",
    ):
        del tiny["vision_config"][name]
    tiny["num_key_value_heads"] = None
    shape = read_shape(folder(tiny))
    config: Any = Qwen2_5_VLConfig.from_pretrained(tmp_path)
    text, vision = config.text_config, config.vision_config
    assert (shape.kv_heads, shape.rms_eps) == (text.num_key_value_heads, text.rms_norm_eps)
    assert (shape.rope_theta, shape.tied) == (text.rope_parameters["rope_theta"], config.tie_word_embeddings)
    assert shape.vision == replace(
        shape.vision,
        patch=vision.patch_size,
        temporal_patch=vision.temporal_patch_size,
        merge=vision.spatial_merge_size,
        in_channels=vision.in_channels,
        window=vision.window_size,
        full_attention_blocks=tuple(vision.fullatt_block_indexes),
        tokens_per_second=vision.tokens_per_second,
    )


def test_the_generation_config_has_the_last_word_on_ids(tiny: Config, folder: Folder) -> None:
    assert read_shape(folder(tiny)).eos_ids == (446,)
    assert read_shape(folder(tiny)).pad_id is None
    shape = read_shape(folder(tiny, {"eos_token_id": [447, 448], "pad_token_id": 0}))
    assert (shape.eos_ids, shape.pad_id) == ((447, 448), 0)


def test_ids_outside_the_vocabulary_end_nothing(tiny: Config, folder: Folder) -> None:
    shape = read_shape(folder({**tiny, "eos_token_id": [151645, 446], "pad_token_id": 151643}))
    assert (shape.eos_ids, shape.pad_id) == ((446,), None)


def test_media_and_padding_ids_are_never_sampled(flat_3b: Config, generation_3b: Config, folder: Folder) -> None:
    assert media_ids(read_shape(folder(flat_3b, generation_3b))) == (151643, 151652, 151653, 151654, 151655, 151656)
    assert media_ids(read_shape(folder(flat_3b))) == (151652, 151653, 151654, 151655, 151656)


def test_a_padding_id_that_alone_ends_responses_stays_sampleable(tiny: Config, folder: Folder) -> None:
    media = (440, 441, 442, 443, 444)
    assert media_ids(read_shape(folder(tiny, {"eos_token_id": 446, "pad_token_id": 446}))) == media
    assert media_ids(read_shape(folder(tiny, {"eos_token_id": [446, 447], "pad_token_id": 446}))) == (*media, 446)


def test_a_patch_size_may_be_a_repeated_number(tiny: Config, folder: Folder) -> None:
    tiny["vision_config"]["patch_size"] = [14, 14]
    assert read_shape(folder(tiny)).vision.patch == 14
    tiny["vision_config"]["patch_size"] = [14, 16]
    with pytest.raises(ModelError, match="vision_config.patch_size"):
        read_shape(folder(tiny))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": -48}, "hidden_size"),
        ({"hidden_size": 48.0}, "hidden_size"),
        ({"hidden_size": 50}, "num_attention_heads"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": None}, "vocab_size"),
        ({"head_dim": 16}, "head_dim"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"mrope_section": [1, 1, 3]}}, "rope_scaling.mrope_section"),
        ({"rope_scaling": {"mrope_section": [2, 2]}}, "rope_scaling.mrope_section"),
        ({"rope_scaling": {"mrope_section": "all"}}, "rope_scaling.mrope_section"),
        ({"rope_scaling": None}, "rope_parameters.mrope_section"),
        ({"rope_scaling": []}, "rope_scaling"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"vision_config": None}, "vision_config"),
        ({"vision_config": {}}, "vision_config.depth"),
        ({"image_token_id": 450}, "image_token_id"),
        ({"video_token_id": 440}, "video_token_id"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"eos_token_id": [446, -1]}, "eos_token_id"),
        ({"text_config": 5}, "text_config"),
    ],
)
def test_an_unusable_field_is_named_with_its_file(tiny: Config, folder: Folder, change: Config, field: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_shape(folder({**tiny, **change}))
    assert caught.value.where.endswith(f"config.json: {field}")
    assert caught.value.needed


@pytest.mark.parametrize(
    ("change", "field"),
    [({"out_hidden_size": 64}, "out_hidden_size"), ({"num_heads": 3}, "num_heads"), ({"num_heads": 8}, "num_heads")],
)
def test_an_unusable_vision_field_is_named(tiny: Config, folder: Folder, change: Config, field: str) -> None:
    tiny["vision_config"] |= change
    with pytest.raises(ModelError) as caught:
        read_shape(folder(tiny))
    assert caught.value.where.endswith(f"vision_config.{field}")


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "[" * 100_000, "\udcff"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match="config.json"):
        read_shape(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="config.json"):
        read_shape(tmp_path)
