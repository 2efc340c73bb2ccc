"""The configuration files of each preset. Knows neither weights nor how a tokenizer is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from rollplex.presets.tokenizer import TokenIds

PATCH: Final = 14
MERGE: Final = 2
TEMPORAL_PATCH: Final = 2


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The sizes of one preset; the rest is alike in all."""

    name: str
    purpose: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    mrope_section: tuple[int, int, int]
    vision_depth: int
    vision_hidden: int
    vision_heads: int
    vision_intermediate: int
    num_parameters: int
    """Stated here, and checked against what transformers counts by a test."""
    max_tokens: int = 4096
    """Longest prompt with its response."""
    vision_full: tuple[int, ...] = ()
    """Blocks of the tower that attend over a whole picture; empty: the last one."""
    tied: bool = False
    """The embedding is the output layer too."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights in the folder."""
    std: float = 0.12
    """Of the numbers of fresh matrices. 0.12 is about 1 / sqrt(64): with transformers' 0.02 a small model hardly
    learns."""
    words: int = 0
    """Ids that the tokenizer makes out of texts, its special ones included; 0: all of `vocab`. The others are tokens
    that no text becomes, so that a vocabulary can be larger than what a page of text gives merges for."""


TINY: Final = Preset(
    name="tiny",
    purpose="learns the digits demo from scratch on one core",
    vocab=448,
    hidden=64,
    layers=2,
    heads=2,
    kv_heads=1,
    intermediate=128,
    mrope_section=(4, 6, 6),
    vision_depth=2,
    vision_hidden=64,
    vision_heads=2,
    vision_intermediate=128,
    num_parameters=372_544,
)
TINY_WIDE: Final = Preset(
    name="tiny-wide",
    purpose="tensor parallelism of up to 4 on a host: as many heads of keys and values, and as many of the tower's",
    vocab=448,
    hidden=64,
    layers=2,
    heads=8,
    kv_heads=4,
    intermediate=128,
    mrope_section=(1, 1, 2),
    vision_depth=2,
    vision_hidden=64,
    vision_heads=4,
    vision_intermediate=128,
    num_parameters=372_544,
)
TINY_GPU: Final = Preset(
    name="tiny-gpu",
    purpose="the smallest that SGLang and tensor parallelism of 2 take: heads of 64, all widths multiples of 64",
    vocab=512,
    hidden=256,
    layers=2,
    heads=4,
    kv_heads=2,
    intermediate=512,
    mrope_section=(8, 12, 12),
    vision_depth=2,
    vision_hidden=128,
    vision_heads=4,
    vision_intermediate=256,
    num_parameters=2_319_232,
)
SMALL: Final = Preset(
    name="small",
    purpose="benches on a host: arithmetic outweighs the calls; per vision token, tower and language model cost alike",
    vocab=512,
    hidden=256,
    layers=4,
    heads=4,
    kv_heads=2,
    intermediate=704,
    mrope_section=(8, 12, 12),
    vision_depth=3,
    vision_hidden=128,
    vision_heads=4,
    vision_intermediate=256,
    num_parameters=4_256_000,
)
QWEN_3B: Final = Preset(
    name="qwen2.5-vl-3b",
    purpose="benches on a GPU: the sizes of the published Qwen2.5-VL-3B, with fresh weights in bfloat16 (7.5 GB)",
    vocab=151_936,
    hidden=2048,
    layers=36,
    heads=16,
    kv_heads=2,
    intermediate=11_008,
    mrope_section=(16, 24, 24),
    vision_depth=32,
    vision_hidden=1280,
    vision_heads=16,
    vision_intermediate=3420,
    num_parameters=3_754_622_976,
    max_tokens=32_768,
    vision_full=(7, 15, 23, 31),
    tied=True,
    dtype="bfloat16",
    std=0.02,
    words=512,
)
PRESETS: Final = {preset.name: preset for preset in (TINY, TINY_WIDE, TINY_GPU, SMALL, QWEN_3B)}


def model_config(preset: Preset, ids: TokenIds) -> dict[str, object]:
    """config.json, flat as in the published Qwen2.5-VL folders."""
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "torch_dtype": preset.dtype,
        "bos_token_id": ids.padding,
        "eos_token_id": ids.end_of_turn,
        "pad_token_id": ids.padding,
        "image_token_id": ids.image,
        "video_token_id": ids.video,
        "vision_start_token_id": ids.vision_start,
        "vision_end_token_id": ids.vision_end,
        "vision_token_id": ids.vision_pad,
        "hidden_act": "silu",
        "hidden_size": preset.hidden,
        "intermediate_size": preset.intermediate,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.kv_heads,
        "num_hidden_layers": preset.layers,
        "max_position_embeddings": preset.max_tokens,
        "max_window_layers": preset.layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": list(preset.mrope_section)},
        "sliding_window": preset.max_tokens,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": preset.tied,
        "use_cache": True,
        "vocab_size": preset.vocab,
        "vision_config": _vision_config(preset),
    }


def _vision_config(preset: Preset) -> dict[str, object]:
    return {
        "model_type": "qwen2_5_vl",
        "depth": preset.vision_depth,
        "hidden_act": "silu",
        "hidden_size": preset.vision_hidden,
        "intermediate_size": preset.vision_intermediate,
        "num_heads": preset.vision_heads,
        "in_channels": 3,
        "in_chans": 3,
        "out_hidden_size": preset.hidden,
        "patch_size": PATCH,
        "spatial_patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TEMPORAL_PATCH,
        "tokens_per_second": 2,
        "window_size": 112,
        "fullatt_block_indexes": list(preset.vision_full or (preset.vision_depth - 1,)),
    }


def generation_config(ids: TokenIds) -> dict[str, object]:
    """generation_config.json: what ends a response."""
    return {"bos_token_id": ids.padding, "eos_token_id": [ids.end_of_turn], "pad_token_id": ids.padding}


def image_config() -> dict[str, object]:
    """preprocessor_config.json with Qwen2.5-VL's own constants; the smallest image is 56 x 56, four tokens."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": 12_845_056,
        "patch_size": PATCH,
        "temporal_patch_size": TEMPORAL_PATCH,
        "merge_size": MERGE,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
