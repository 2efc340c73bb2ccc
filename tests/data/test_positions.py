"""mrope positions against transformers' get_rope_index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from rollplex.data.patches import Grid
from rollplex.data.positions import Medium, mrope_positions

RESPONSE = 7


@pytest.fixture(scope="module")
def theirs(model_folder: Path) -> Qwen2_5_VLModel:
    with torch.device("meta"):
        return Qwen2_5_VLModel(Qwen2_5_VLConfig.from_pretrained(model_folder))


Piece = int | tuple[Grid, float | None]
IMAGE = Grid(frames=1, height=6, width=8)
TALL = Grid(frames=1, height=20, width=2)
CLIP = Grid(frames=3, height=4, width=6)
LONG = Grid(frames=40, height=2, width=2)

PROMPTS: dict[str, list[Piece]] = {
    "text": [9],
    "one image": [5, (IMAGE, None), 4],
    "an image first": [1, (TALL, None), 2],
    "several images": [3, (IMAGE, None), 1, (TALL, None), 2, (IMAGE, None), 6],
    "video": [4, (CLIP, 1.0), 5],
    "video at an odd rate": [4, (CLIP, 2 / 7.3), 5],
    "slow video": [4, (CLIP, 2 / 0.1), 90],
    "video that outlasts the text behind it": [4, (LONG, 1.0), 5],
    "video and images": [2, (IMAGE, None), 3, (CLIP, 0.4), 1, (TALL, None), 1, (CLIP, 1.3), 8],
}

OUTLASTING = ("video", "slow video", "video that outlasts the text behind it")
"""Where transformers' generation and its forward of the whole sequence disagree; ours is the latter."""


@pytest.mark.parametrize("name", PROMPTS)
def test_positions_of_prompt_and_response_are_those_of_transformers(name: str, theirs: Qwen2_5_VLModel) -> None:
    kinds, media = lay(PROMPTS[name])
    ours, next_position = mrope_positions(len(kinds), media, merge=2, tokens_per_second=4)
    expected, _ = reference([*kinds, *[0] * RESPONSE], media, theirs)
    assert ours.dtype == np.int64
    assert np.array_equal(ours, expected[:, : len(kinds)])
    assert np.array_equal(np.tile(next_position + np.arange(RESPONSE), (3, 1)), expected[:, len(kinds) :])


@pytest.mark.parametrize("name", [name for name in PROMPTS if name not in OUTLASTING])
def test_a_response_goes_on_where_transformers_generates_it(name: str, theirs: Qwen2_5_VLModel) -> None:
    kinds, media = lay(PROMPTS[name])
    _, next_position = mrope_positions(len(kinds), media, merge=2, tokens_per_second=4)
    _, delta = reference(kinds, media, theirs)
    assert next_position == len(kinds) + delta


@pytest.mark.parametrize("name", PROMPTS)
def test_a_qwen2_vl_counts_temporal_patches_and_not_seconds(name: str) -> None:
    tower: Any = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2}
    text: Any = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        model = Qwen2VLModel(Qwen2VLConfig(text_config={**text, "num_key_value_heads": 1}, vision_config=tower))
    kinds, media = lay(PROMPTS[name])
    ours, next_position = mrope_positions(len(kinds), media, merge=2, tokens_per_second=None)
    expected, _ = reference([*kinds, *[0] * RESPONSE], media, model)
    assert np.array_equal(ours, expected[:, : len(kinds)])
    assert np.array_equal(np.tile(next_position + np.arange(RESPONSE), (3, 1)), expected[:, len(kinds) :])


def lay(pieces: Sequence[Piece]) -> tuple[list[int], list[Medium]]:
    """Kinds of tokens (0 text, 1 image, 2 video) and media, with a token of text around each medium."""
    kinds: list[int] = []
    media: list[Medium] = []
    for piece in pieces:
        if isinstance(piece, int):
            kinds += [0] * piece
        else:
            grid, seconds = piece
            media.append(Medium(start=len(kinds), grid=grid, seconds_per_grid=seconds))
            kinds += [1 if seconds is None else 2] * grid.tokens(2)
    return kinds, media


def reference(
    kinds: Sequence[int], media: Sequence[Medium], model: Qwen2_5_VLModel | Qwen2VLModel
) -> tuple[np.ndarray, int]:
    def grids(video: bool) -> torch.Tensor | None:
        chosen = [m.grid for m in media if (m.seconds_per_grid is not None) == video]
        return torch.tensor([[g.frames, g.height, g.width] for g in chosen]) if chosen else None

    seconds = [m.seconds_per_grid for m in media if m.seconds_per_grid is not None]
    get_rope_index: Any = model.get_rope_index  # its annotations ask for tensor types that torch.tensor does not give
    positions, deltas = get_rope_index(
        torch.ones(1, len(kinds), dtype=torch.long),
        torch.tensor([kinds], dtype=torch.int32),
        image_grid_thw=grids(False),
        video_grid_thw=grids(True),
        second_per_grid_ts=torch.tensor(seconds) if seconds else None,
    )
    return positions[:, 0].numpy(), int(deltas[0, 0])
