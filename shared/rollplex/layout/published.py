"""The shapes of the published Qwen2.5-VL models, for plans of memory that need no model folder.

Owns: the numbers of their config.json files, which tests check against those files' fields and against how many
parameters the hub counts. Does not know: names or places of parameters.
"""

from __future__ import annotations

from typing import Final

from rollplex.layout.shape import ModelShape
from rollplex.layout.vision import VisionShape


def _published(
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    layers: int,
    *,
    vocab: int = 152_064,
    tied: bool = False,
    vision_intermediate: int,
) -> ModelShape:
    vision = VisionShape(
        depth=32,
        hidden=1280,
        intermediate=vision_intermediate,
        heads=16,
        patch=14,
        temporal_patch=2,
        merge=2,
        in_channels=3,
        window=112,
        full_attention_blocks=(7, 15, 23, 31),
        out_hidden=hidden,
        tokens_per_second=2,
    )
    return ModelShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        intermediate=intermediate,
        vocab=vocab,
        tied=tied,
        mrope_section=(16, 24, 24),
        rope_theta=1_000_000.0,
        rms_eps=1e-6,
        vision=vision,
        image_id=151_655,
        video_id=151_656,
        vision_start_id=151_652,
        vision_end_id=151_653,
        vision_pad_id=151_654,
        eos_ids=(151_645,),
    )


QWEN2_5_VL: Final = {
    "3B": _published(2048, 11_008, 16, 2, 36, vocab=151_936, tied=True, vision_intermediate=3420),
    "7B": _published(3584, 18_944, 28, 4, 28, vision_intermediate=3420),
    "32B": _published(5120, 27_648, 40, 8, 64, vision_intermediate=3456),
    "72B": _published(8192, 29_568, 64, 8, 80, vision_intermediate=3456),
}
"""By size. The width of the vision MLP is that of the files, not of the technical report's table (3456 for all)."""
