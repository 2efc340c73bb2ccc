"""Shapes of real and of small models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# The fields of Qwen2.5-VL-3B-Instruct's published config.json that matter here, in its flat form.
FLAT_3B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_hidden_layers": 36,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}
GENERATION_3B: dict[str, Any] = {
    "bos_token_id": 151643,
    "pad_token_id": 151643,
    "eos_token_id": [151645, 151643],
    "do_sample": True,
}
TINY: dict[str, Any] = {
    **FLAT_3B,
    "image_token_id": 440,
    "video_token_id": 441,
    "vision_start_token_id": 442,
    "vision_end_token_id": 443,
    "vision_token_id": 444,
    "bos_token_id": 445,
    "eos_token_id": 446,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    "vocab_size": 450,
    "tie_word_embeddings": False,
    "vision_config": {
        **FLAT_3B["vision_config"],
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 42,
        "num_heads": 2,
        "out_hidden_size": 48,
        "fullatt_block_indexes": [1],
    },
}


@pytest.fixture
def flat_3b() -> dict[str, Any]:
    return json.loads(json.dumps(FLAT_3B))  # type: ignore[no-any-return]


@pytest.fixture
def tiny() -> dict[str, Any]:
    """Flat; vision MLP 42 (padded to 48), vocabulary 450 (padded to 512), untied."""
    return json.loads(json.dumps(TINY))  # type: ignore[no-any-return]


@pytest.fixture
def generation_3b() -> dict[str, Any]:
    return dict(GENERATION_3B)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """folder(config, generation=None) writes a model folder without weights."""

    def write(config: object, generation: object = None) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (tmp_path / "generation_config.json").unlink(missing_ok=True)
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
        return tmp_path

    return write
