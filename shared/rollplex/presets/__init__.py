"""Model folders that Rollplex makes itself: Qwen2.5-VLs with fresh weights and a real tokenizer.

No torch, but for the numbers of a preset in bfloat16 while they are written.
"""

from rollplex.presets.architecture import PRESETS, QWEN_3B, SMALL, TINY, TINY_GPU, TINY_WIDE, Preset
from rollplex.presets.folder import preset_named, write_model, write_preset, write_shape
from rollplex.presets.tokenizer import SPECIAL_TOKENS

__all__ = [
    "PRESETS",
    "QWEN_3B",
    "SMALL",
    "SPECIAL_TOKENS",
    "TINY",
    "TINY_GPU",
    "TINY_WIDE",
    "Preset",
    "preset_named",
    "write_model",
    "write_preset",
    "write_shape",
]
