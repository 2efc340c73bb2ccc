"""config.json of published Qwen2.5-VL and Qwen2-VL models, as far as shapes depend on it, in the flat form they have on
the hub; and the two nested forms in which transformers 4 and 5 write the same models."""

from __future__ import annotations

from typing import Any, NamedTuple

Config = dict[str, Any]


class Published(NamedTuple):
    """A model on the hub."""

    config: Config
    parameters: int
    """What the hub counts in its safetensors files."""


_FLAT: Config = {
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}


def _qwen2_5(vision_wide: int, **text: Any) -> Config:
    vision = {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": vision_wide,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    }
    names = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    return {**names, **_FLAT, **text, "vision_config": vision}


def _qwen2(**text: Any) -> Config:
    vision = {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": text["hidden_size"],
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    }
    names = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
    return {**names, **_FLAT, **text, "vision_config": vision}


def _text(hidden: int, wide: int, heads: int, kv_heads: int, layers: int, *, vocab: int, tied: bool = False) -> Config:
    return {
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "max_window_layers": layers,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


PUBLISHED: dict[str, Published] = {
    "Qwen2.5-VL-3B": Published(_qwen2_5(3420, **_text(2048, 11008, 16, 2, 36, vocab=151936, tied=True)), 3_754_622_976),
    "Qwen2.5-VL-7B": Published(_qwen2_5(3420, **_text(3584, 18944, 28, 4, 28, vocab=152064)), 8_292_166_656),
    "Qwen2.5-VL-32B": Published(_qwen2_5(3456, **_text(5120, 27648, 40, 8, 64, vocab=152064)), 33_452_718_336),
    "Qwen2.5-VL-72B": Published(_qwen2_5(3456, **_text(8192, 29568, 64, 8, 80, vocab=152064)), 73_410_777_344),
    "Qwen2-VL-2B": Published(_qwen2(**_text(1536, 8960, 12, 2, 28, vocab=151936, tied=True)), 2_208_985_600),
    "Qwen2-VL-7B": Published(_qwen2(**_text(3584, 18944, 28, 4, 28, vocab=152064)), 8_291_375_616),
    "Qwen2-VL-72B": Published(_qwen2(**_text(8192, 29568, 64, 8, 80, vocab=152064)), 73_405_560_320),
}

_TEXT_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
    "max_window_layers", "vocab_size", "attention_dropout", "hidden_act", "initializer_range", "rms_norm_eps",
    "sliding_window", "use_sliding_window", "use_cache", "bos_token_id", "eos_token_id",
)  # fmt: skip


def as_transformers_4(config: Config) -> Config:
    """What save_pretrained of transformers 4.52 to 4.57 makes of it: the text's fields both at the top and nested."""
    text = {name: config[name] for name in _TEXT_FIELDS} | {"sliding_window": None}
    text |= {"model_type": f"{config['model_type']}_text", "tie_word_embeddings": config["tie_word_embeddings"]}
    text |= {"rope_theta": config["rope_theta"], "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    text |= {"rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [16, 24, 24]}}
    text |= {"image_token_id": None, "video_token_id": None, "vision_token_id": 151654, "torch_dtype": "bfloat16"}
    top = {**config, "rope_scaling": text["rope_scaling"], "transformers_version": "4.52.4"}
    del top["tie_word_embeddings"]
    vision = {
        **config["vision_config"],
        "in_channels": 3,
        "model_type": config["model_type"],
        "initializer_range": 0.02,
    }
    return {**top, "text_config": text, "vision_config": vision}


def as_transformers_5(config: Config) -> Config:
    """What transformers 5 makes of it: the text's fields nested only, rope_parameters, dtype."""
    text = {name: config[name] for name in _TEXT_FIELDS} | {"sliding_window": None, "dtype": "bfloat16"}
    text |= {"model_type": f"{config['model_type']}_text", "pad_token_id": None}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
    kept = ["architectures", "model_type", "tie_word_embeddings", "image_token_id", "video_token_id"]
    kept += ["vision_start_token_id", "vision_end_token_id", "vision_token_id"]
    vision = {
        name: value for name, value in config["vision_config"].items() if name not in {"in_chans", "spatial_patch_size"}
    }
    vision |= {"in_channels": 3, "model_type": f"{config['model_type']}_vision", "dtype": "bfloat16"}
    vision |= {"rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}}
    top = {name: config[name] for name in kept} | {"dtype": "bfloat16", "transformers_version": "5.24.0"}
    return {**top, "text_config": text, "vision_config": vision}
