"""Model folders that Rollplex makes itself: small Qwen2.5-VLs with fresh weights and a real tokenizer. No torch."""

from rollplex.presets.architecture import PRESETS, SMALL, TINY, TINY_GPU, Preset
from rollplex.presets.folder import write_preset
from rollplex.presets.tokenizer import SPECIAL_TOKENS

__all__ = ["PRESETS", "SMALL", "SPECIAL_TOKENS", "TINY", "TINY_GPU", "Preset", "write_preset"]
