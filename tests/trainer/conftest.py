"""A tiny Qwen2.5-VL folder, prompts and responses for it, and trainer services over segments of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from rollplex.layout.shape import read_shape
from rollplex.protocol.common import MediaSlot, PromptSlot
from support.trainer import (
    GRIDS,
    LENGTHS,
    PROMPTS,
    SPECIAL,
    TEXT,
    VISION,
    HostSegments,
    Prompt,
    Sampled,
    World,
    sampled,
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings, both towers, random weights far enough from 0 that every parameter matters."""
    folder = tmp_path_factory.mktemp("model")
    config = Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION, tie_word_embeddings=True, **SPECIAL)
    torch.manual_seed(3)
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name or "ln_q" in name else 0.0, 0.15)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def make_segments() -> Iterator[Callable[[], HostSegments]]:
    made: list[HostSegments] = []

    def make() -> HostSegments:
        made.append(HostSegments())
        return made[-1]

    yield make
    for segments in made:
        segments.close()


@pytest.fixture(scope="session")
def prompts(model_folder: Path) -> list[Prompt]:
    """One image, text only, two images; of unequal length."""
    config = Qwen2_5_VLConfig.from_pretrained(model_folder)
    with torch.device("meta"):
        positions_of: Any = Qwen2_5_VLForConditionalGeneration(config).model.get_rope_index
    width = read_shape(model_folder).row_width
    made = []
    for number, (tokens, grids) in enumerate(zip(PROMPTS, GRIDS, strict=True)):
        ids = torch.tensor(tokens)
        kinds = (ids == SPECIAL["image_token_id"]).int()
        grid = torch.tensor(grids) if grids else None
        positions, _ = positions_of(ids[None], mm_token_type_ids=kinds[None], image_grid_thw=grid)
        media, row = [], 0
        for frames, height, columns in grids:
            media.append(MediaSlot(offset=row * width * 4, frames=frames, height=height, width=columns))
            row += frames * height * columns
        slot = PromptSlot(
            group=number,
            row=100 + number,
            tokens=len(ids),
            ids_offset=0,
            positions_offset=0,
            next_position=int(positions.max()) + 1,
            media=tuple(media),
        )
        draw = torch.Generator().manual_seed(number)
        pixels = torch.randn(row, width, generator=draw) if row else None
        made.append(Prompt(slot, ids, positions[:, 0], pixels, grid, kinds))
    return made


@pytest.fixture(scope="session")
def groups() -> list[Sampled]:
    return [sampled(number) for number in range(len(LENGTHS))]


@pytest.fixture
def make_world(
    model_folder: Path, prompts: list[Prompt], make_segments: Callable[[], HostSegments]
) -> Callable[..., World]:
    def make(dtype: str = "float32", **changes: Any) -> World:
        return World(model_folder, prompts, make_segments(), dtype, **changes)

    return make
