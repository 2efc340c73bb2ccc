"""What one training rank holds of K and V between prefix and suffix: its own K/V heads. Pure, no torch."""

from __future__ import annotations

from dataclasses import replace

from rollplex.errors import ConfigError
from rollplex.layout.shape import ModelShape


def rank_shape(shape: ModelShape, degree: int) -> ModelShape:
    """The shape whose `KvLayout` is that of one of `degree` ranks.

    Raises:
        ConfigError: a rank would have a part of a K/V head. Weights can be stored so, but the passes have no gather of
            K and V over the ranks of a head yet.
    """
    if shape.kv_heads % degree:
        raise ConfigError(
            "Tensor-parallel training needs whole K/V heads on every rank",
            got=f"{shape.kv_heads} K/V heads / {degree} ranks = {shape.kv_heads / degree:g}",
            needed="a whole number",
            do=f"Take a degree that divides {shape.kv_heads}.",
            where="training",
        )
    return replace(shape, heads=shape.heads // degree, kv_heads=shape.kv_heads // degree)
