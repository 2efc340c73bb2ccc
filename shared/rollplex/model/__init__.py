"""Qwen2.5-VL on segments: prefix, suffix, decode. Needs torch."""
