"""The numbers that fix a vision tower's shape, and where the two architectures differ in them.

Owns: which field of vision_config gives which number. Does not know: the language model, tensors, parameter names.

                    qwen2_5_vl                         qwen2_vl
    width           hidden_size                        embed_dim
    MLP             gated, three matrices              two matrices, embed_dim * mlp_ratio wide
    norms           RMSNorm                            LayerNorm, with bias
    attention       in windows but for a few blocks    within whole frames
    leads to        out_hidden_size                    hidden_size
    time in mrope   by the seconds of the video        one position per temporal patch
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from rollplex.errors import ModelError
from rollplex.layout.fields import Fields

Architecture: TypeAlias = Literal["qwen2_5_vl", "qwen2_vl"]
"""config.json's model_type. The language models of the two are the same."""
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionShape:
    """The vision tower. Lengths are in pixels where they concern images, else in numbers per vector."""

    architecture: Architecture = "qwen2_5_vl"
    depth: int
    """Blocks."""
    hidden: int
    intermediate: int
    """Width of the MLP as transformers has it, without SGLang's padding."""
    heads: int
    patch: int
    """Side of a patch in pixels."""
    temporal_patch: int
    """Frames per patch."""
    merge: int
    """merge x merge patches become one token."""
    in_channels: int
    window: int
    """Side of an attention window in pixels; 0: there are none, every block attends within whole frames."""
    full_attention_blocks: tuple[int, ...]
    """Blocks without windows."""
    out_hidden: int
    tokens_per_second: int | None
    """Temporal mrope positions per second of video; None: one per temporal patch, whatever the seconds."""
    ranks: int = 1
    """How many tensor-parallel ranks share the heads and the MLP, if `heads` and `intermediate` are one rank's."""

    @property
    def head_dim(self) -> int:
        return self.hidden // (self.heads * self.ranks)

    @property
    def attention_width(self) -> int:
        """Numbers of all heads: `hidden`, or a rank's share of it."""
        return self.heads * self.head_dim

    @property
    def merger_width(self) -> int:
        """Numbers per token inside the merger: merge * merge * hidden."""
        return self.merge * self.merge * self.hidden


def read_vision_shape(vision: Fields, architecture: Architecture) -> VisionShape:
    """From the fields of vision_config, with transformers' defaults for fields that only select behaviour.

    Raises:
        ModelError: a field that is absent or unusable, named in `where`.
    """
    match architecture:
        case "qwen2_5_vl":
            shape, width_field = _qwen2_5(vision), "hidden_size"
        case "qwen2_vl":
            shape, width_field = _qwen2(vision), "embed_dim"
    divides(vision, "num_heads", shape.heads, width_field, shape.hidden)
    if shape.head_dim % 4:
        raise ModelError(
            "A vision head cannot hold rotary positions of two axes",
            got=f"{width_field} / num_heads = {shape.head_dim}",
            needed="a multiple of 4",
            where=vision.where("num_heads"),
        )
    return shape


def width_name(architecture: Architecture) -> str:
    """The field of vision_config that must be the language model's hidden_size."""
    return "out_hidden_size" if architecture == "qwen2_5_vl" else "hidden_size"


def divides(fields: Fields, small_name: str, small: int, large_name: str, large: int) -> None:
    """Raise ModelError at `small_name` unless `large` is a multiple of `small`."""
    if large % small:
        raise ModelError(
            f"{small_name} does not divide {large_name}",
            got=f"{large} / {small}",
            needed="a whole number",
            where=fields.where(small_name),
        )


def _qwen2_5(vision: Fields) -> VisionShape:
    return VisionShape(
        depth=vision.whole("depth"),
        hidden=vision.whole("hidden_size"),
        intermediate=vision.whole("intermediate_size"),
        heads=vision.whole("num_heads"),
        patch=vision.side("patch_size", 14),
        temporal_patch=vision.side("temporal_patch_size", 2),
        merge=vision.whole("spatial_merge_size", 2),
        in_channels=vision.whole("in_channels", 3),
        window=vision.whole("window_size", 112),
        full_attention_blocks=vision.wholes("fullatt_block_indexes", (7, 15, 23, 31)),
        out_hidden=vision.whole("out_hidden_size"),
        tokens_per_second=vision.whole("tokens_per_second", 4),
    )


def _qwen2(vision: Fields) -> VisionShape:
    depth, hidden = vision.whole("depth"), vision.whole("embed_dim")
    return VisionShape(
        architecture="qwen2_vl",
        depth=depth,
        hidden=hidden,
        intermediate=hidden * vision.whole("mlp_ratio", 4),
        heads=vision.whole("num_heads"),
        patch=vision.side("patch_size", 14),
        temporal_patch=vision.side("temporal_patch_size", 2),
        merge=vision.whole("spatial_merge_size", 2),
        in_channels=vision.whole("in_channels", 3),
        window=0,
        full_attention_blocks=tuple(range(depth)),
        out_hidden=vision.whole("hidden_size"),
        tokens_per_second=None,
    )
