"""The vision tower: once over all media rows of a batch.

Owns: the index tables that the tower needs (derived once per combination of grids) and its attention, which runs
windows of equal length together. Does not know: prompts or tokens; see `rollplex.model.prefix`.

Qwen2.5-VL attends in windows in most of its blocks; Qwen2-VL in none.

transformers derives the tables anew at each call, in Python, and without flash attention loops over windows one by one.
Tables are passed in under the names that transformers' own helpers look for. The attention registers under a name that
contains "flash", because transformers gives packed sequences with their boundaries only to such a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from rollplex.model.attention import kernel_for
from rollplex.model.device import HOST

VISION_ATTENTION = "rollplex_flash_layout"
Grid = tuple[int, int, int]
"""Frames, height and width of one image or video, in patches."""
PLANS_KEPT = 64


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Sequences that lie one after the other in one row of patches.

    boundaries: int32 [n + 1]. lengths: the different lengths. indices: for each of them the patch rows, [n_i * length],
    or None where all have one length. restore: puts concatenated results back in order.
    """

    boundaries: Tensor
    lengths: tuple[int, ...]
    indices: tuple[Tensor, ...] | None
    restore: Tensor | None


@dataclass(frozen=True, kw_only=True)
class VisionPlan:
    """Everything the tower derives from grids alone."""

    grids: Tensor
    position_ids: Tensor
    full: Packed
    """Frames."""
    windows: Packed
    """In a tower without windows, the frames again."""
    window_index: Tensor | None
    """None in a tower without windows."""


class PatchProjection(nn.Module):
    """The patch embedding as a product of matrices: its convolution's kernel covers exactly one pixel row.

    Same parameter, same numbers to rounding; three times as fast as Conv3d on a CPU.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        """weight: Conv3d's, [out, channels, temporal patch, patch, patch]."""
        super().__init__()
        self.weight = weight

    def forward(self, pixels: Tensor) -> Tensor:
        """[N, channels, temporal patch, patch, patch] -> [N, out]."""
        return F.linear(pixels.flatten(1), self.weight.flatten(1))


def vision_features(visual: nn.Module, pixel_rows: Tensor, grids: Sequence[Grid]) -> Tensor:
    """Features of all images and videos, in their order.

    Args:
        visual: transformers' vision tower with `VISION_ATTENTION` set.
        pixel_rows: [sum of t*h*w, row_width].
        grids: (t, h, w) per image or video.

    Returns:
        [sum of t*h*w / merge**2, hidden of the language model].
    """
    tower: Any = visual
    window, patch = (tower.window_size, tower.patch_size) if hasattr(tower, "window_size") else (0, 0)
    plan = vision_plan(tuple(grids), int(tower.spatial_merge_size), int(window), int(patch), pixel_rows.device)
    windows: dict[str, Any] = {}
    if plan.window_index is not None:
        windows = {"window_index": plan.window_index, "cu_window_seqlens": plan.windows.boundaries}
    out = tower(
        pixel_rows,
        grid_thw=plan.grids,
        position_ids=plan.position_ids,
        cu_seqlens=plan.full.boundaries,
        rollplex=plan,
        **windows,
    )
    features: Tensor = out.pooler_output
    return features


@lru_cache(maxsize=PLANS_KEPT)
def vision_plan(grids: tuple[Grid, ...], merge: int, window: int, patch: int, device: torch.device) -> VisionPlan:
    """The tables for these grids on `device`; made on the host by transformers' own helpers. window 0: no windows."""
    sizes = torch.tensor(grids, dtype=torch.int64, device=HOST)
    full = windows = _packed(get_vision_cu_seqlens(sizes), device)
    index = None
    if window:
        index, cuts = get_vision_window_index(sizes, spatial_merge_size=merge, window_size=window, patch_size=patch)
        index, windows = index.to(device), _packed(cuts, device)
    return VisionPlan(
        grids=sizes.to(device),
        position_ids=get_vision_position_ids(sizes, merge).to(device),
        full=full,
        windows=windows,
        window_index=index,
    )


def _packed(boundaries: Tensor, device: torch.device) -> Packed:
    starts, sizes = boundaries[:-1].long(), boundaries.diff().long()
    lengths = tuple(sorted({int(n) for n in sizes}))
    on_device = boundaries.to(device)
    if len(lengths) == 1:
        return Packed(boundaries=on_device, lengths=lengths, indices=None, restore=None)
    indices = [(starts[sizes == n, None] + torch.arange(n, device=HOST)).flatten() for n in lengths]
    restore = torch.cat(indices).argsort()
    return Packed(
        boundaries=on_device,
        lengths=lengths,
        indices=tuple(i.to(device) for i in indices),
        restore=restore.to(device),
    )


def vision_attention(
    module: nn.Module,  # noqa: ARG001 - transformers' calling convention
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - transformers' calling convention
    *,
    scaling: float,
    cu_seq_lens_q: Tensor | None = None,
    rollplex: VisionPlan | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Full attention within each packed sequence. query, key, value: [1, heads, S, D]; returns [1, S, heads, D]."""
    if rollplex is None:
        raise AssertionError("the vision tower was called without a plan: use vision_features")
    packed = rollplex.full if cu_seq_lens_q is rollplex.full.boundaries else rollplex.windows
    if cu_seq_lens_q is not packed.boundaries:
        raise AssertionError("transformers passed boundaries that are not the plan's")
    parts = (query[0], key[0], value[0])
    if packed.indices is None or packed.restore is None:
        # A copy of V: as a view it would keep the whole q|k|v projection alive until the backward.
        copied = (*parts[:2], parts[2].clone())
        return _equal_lengths(copied, packed.lengths[0], scaling)[None], None
    outs = [
        _equal_lengths(tuple(t.index_select(1, index) for t in parts), length, scaling)
        for length, index in zip(packed.lengths, packed.indices, strict=True)
    ]
    return torch.cat(outs).index_select(0, packed.restore)[None], None


def _equal_lengths(parts: tuple[Tensor, ...], length: int, scaling: float) -> Tensor:
    """q, k, v [heads, n*length, D] -> [n*length, heads, D]."""
    query, key, value = (t.view(t.shape[0], -1, length, t.shape[2]).transpose(0, 1) for t in parts)
    with kernel_for(query):
        out = F.scaled_dot_product_attention(query, key, value, scale=scaling)
    return out.transpose(1, 2).flatten(0, 1)


ALL_ATTENTION_FUNCTIONS.register(VISION_ATTENTION, vision_attention)
