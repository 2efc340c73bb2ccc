"""A tiny Qwen2.5-VL or Qwen2-VL with random weights, and prompts for it: text, images, a video."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen2VLConfig

from rollplex.layout.shape import read_shape
from rollplex.protocol.common import MediaSlot, PromptSlot

VOCAB = 70
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    "pad_token_id": 69,
    "eos_token_id": 68,
    "bos_token_id": None,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "out_hidden_size": 16,
    "fullatt_block_indexes": [0],
    "window_size": 56,
}
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
}
WIDE_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 128,
    "intermediate_size": 200,
    "out_hidden_size": 256,
    "fullatt_block_indexes": [1],
}
"""Heads of 64, and an MLP that is stored padded: what a GPU's kernels are made for."""
FOUR: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
FOUR_VISION: dict[str, Any] = {"hidden_size": 32, "num_heads": 4, "out_hidden_size": 64}
"""For up to four tensor-parallel ranks."""
OLDER_VISION: dict[str, Any] = {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2}
"""Of a Qwen2-VL."""
IMAGE, VIDEO = 64, 65
SPECIAL: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": 66,
    "vision_end_token_id": 67,
}
NEVER_SAMPLED = (64, 65, 66, 67, 69)
Grid: TypeAlias = tuple[int, int, int]
"""Frames, height and width in patches; 2 x 2 patches of a frame are one placeholder."""
Written: TypeAlias = tuple[Sequence[int], Sequence[Grid]]
"""A prompt's ids, and the grids of its media in order; either images or videos."""
PICTURE: Written = ([3, 66, 64, 64, 64, 64, 67, 9], [(1, 4, 4)])
WORDS: Written = ([11, 12, 13], [])
PICTURES: Written = ([5, 66, 64, 67, 8, 66, 64, 64, 67, 1], [(1, 2, 2), (1, 2, 4)])
FILM: Written = ([66, 65, 65, 65, 65, 67, 2, 7, 40], [(2, 2, 4)])


@dataclass
class Prompt:
    """One prompt as the input child would have made it."""

    slot: PromptSlot
    """Its media's offsets are those in `pixels`; the others are 0."""
    ids: Tensor
    positions: Tensor
    pixels: Tensor | None
    grids: Tensor | None
    kinds: Tensor
    """transformers' mm_token_type_ids of the prompt."""

    @property
    def media(self) -> dict[str, Tensor]:
        """transformers' arguments for its images or videos."""
        if self.pixels is None or self.grids is None:
            return {}
        if int(self.kinds.max()) == 1:
            return {"pixel_values": self.pixels, "image_grid_thw": self.grids}
        ticks = torch.ones(len(self.grids))
        return {"pixel_values_videos": self.pixels, "video_grid_thw": self.grids, "second_per_grid_ts": ticks}


def write_model(
    folder: Path, *, seed: int = 3, tied: bool = True, older: bool = False, wide: bool = False, kv_heads: int = 0
) -> None:
    """Both towers, random weights far enough from 0 that every parameter matters. older: Qwen2-VL. wide: for a GPU.
    kv_heads: of a Qwen2.5-VL for up to four ranks."""
    make: Any = Qwen2VLConfig if older else Qwen2_5_VLConfig
    vision = OLDER_VISION if older else VISION | (WIDE_VISION if wide else {}) | (FOUR_VISION if kv_heads else {})
    text = TEXT | (WIDE if wide else {}) | (FOUR | {"num_key_value_heads": kv_heads} if kv_heads else {})
    config = make(text_config=text, vision_config=vision, tie_word_embeddings=tied, **SPECIAL)
    torch.manual_seed(seed)
    model = _stock(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = ("norm" in name or "ln_q" in name) and not name.endswith("bias")
            parameter.normal_(1.0 if scale else 0.0, 0.05 if wide else 0.15)
    model.save_pretrained(folder)


def _stock(config: Any) -> Any:
    return AutoModelForImageTextToText.from_config(config)  # type: ignore[no-untyped-call]


def make_prompts(folder: Path, written: Sequence[Written]) -> list[Prompt]:
    """Groups 0, 1, ... with rows 100, 101, ...; positions are transformers' own, pixels random."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        positions_of = _stock(config).model.get_rope_index
    width = read_shape(folder).row_width
    made = []
    for number, (tokens, grids) in enumerate(written):
        ids = torch.tensor(tokens)
        kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
        draw = torch.Generator().manual_seed(number)
        rows = sum(t * h * w for t, h, w in grids)
        prompt = Prompt(
            slot=PromptSlot(
                group=number, row=100 + number, tokens=len(ids), ids_offset=0, positions_offset=0, next_position=0
            ),
            ids=ids,
            positions=torch.empty(0),
            pixels=torch.randn(rows, width, generator=draw) if rows else None,
            grids=torch.tensor(grids) if rows else None,
            kinds=kinds,
        )
        places = {name: value for name, value in prompt.media.items() if not name.startswith("pixel")}
        prompt.positions = positions_of(ids[None], mm_token_type_ids=kinds[None], **places)[0][:, 0]
        prompt.slot = _with_media(prompt.slot, prompt.positions, grids, 4 * width)
        made.append(prompt)
    return made


def _with_media(slot: PromptSlot, positions: Tensor, grids: Sequence[Grid], row_bytes: int) -> PromptSlot:
    media, row = [], 0
    for frames, height, columns in grids:
        media.append(MediaSlot(offset=row * row_bytes, frames=frames, height=height, width=columns))
        row += frames * height * columns
    return PromptSlot(
        group=slot.group,
        row=slot.row,
        tokens=slot.tokens,
        ids_offset=0,
        positions_offset=0,
        next_position=int(positions.max()) + 1,
        media=tuple(media),
    )
