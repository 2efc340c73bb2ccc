"""Pixel rows against transformers' own processor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rollplex.data.images import ImageFolder
from rollplex.data.patches import Patches, frame_patches, image_grid, image_patches, smart_resize, video_grid
from rollplex.data.processor import PixelRules, Rules
from rollplex.errors import DataError

Picture = Callable[[int, int, int], Image.Image]


@pytest.fixture(scope="module")
def theirs(model_folder: Path) -> Any:
    return Qwen2VLImageProcessorPil.from_pretrained(model_folder)


@pytest.mark.parametrize("size", [(56, 56), (224, 168), (61, 299), (8, 8), (1, 190), (1000, 700), (30, 28)])
def test_an_image_gives_the_same_pixel_rows_as_transformers(
    size: tuple[int, int], picture: Picture, rules: Rules, theirs: Any
) -> None:
    image = picture(*size, 5)
    expected = theirs(images=[image], return_tensors="np")
    ours = image_patches(image, rules.image)
    assert [[1, ours.grid.height, ours.grid.width]] == expected["image_grid_thw"].tolist()
    assert np.abs(ours.numbers() - expected["pixel_values"]).max() == 0.0
    assert ours.numbers().dtype == np.float32


def test_an_image_above_the_largest_size_is_scaled_down_as_transformers_does(
    picture: Picture, rules: Rules, model_folder: Path
) -> None:
    theirs: Any = Qwen2VLImageProcessorPil.from_pretrained(model_folder, max_pixels=100 * 28 * 28)
    image = picture(997, 431, 6)
    expected = theirs(images=[image], return_tensors="np")
    ours = image_patches(image, replace(rules.image, max_pixels=100 * 28 * 28))
    assert np.array_equal(ours.numbers(), expected["pixel_values"])


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "CMYK", "1", "PA"])
def test_odd_modes_become_the_pixels_that_transformers_sees(
    mode: str, picture: Picture, rules: Rules, theirs: Any, tmp_path: Path
) -> None:
    image = picture(70, 90, 7).convert("RGBA" if "A" in mode else "RGB")
    if "A" in mode:
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    image = image.convert(mode)
    name = "odd.tif" if mode in {"CMYK", "PA"} else "odd.png"
    if mode == "PA":
        image, name = image.convert("LA"), "odd.png"
    image.save(tmp_path / name)
    ours = image_patches(ImageFolder(tmp_path, 10**6).load(name), rules.image).numbers()
    with Image.open(tmp_path / name) as opened:
        expected = theirs(images=[opened], return_tensors="np")["pixel_values"]
    assert np.array_equal(ours, expected)


def test_a_palette_with_a_transparent_colour_is_laid_on_white_as_transformers_does(
    picture: Picture, rules: Rules, theirs: Any, tmp_path: Path
) -> None:
    picture(64, 64, 8).convert("P").save(tmp_path / "p.png", transparency=3)
    ours = image_patches(ImageFolder(tmp_path, 10**6).load("p.png"), rules.image).numbers()
    with Image.open(tmp_path / "p.png") as opened:
        assert np.array_equal(ours, theirs(images=[opened], return_tensors="np")["pixel_values"])


def video_patches(frames: list[Image.Image], rules: PixelRules) -> Patches:
    """Of all frames of one video, of one size."""
    return frame_patches(frames, video_grid(len(frames), frames[0].height, frames[0].width, rules), rules)


def test_a_video_of_one_frame_is_the_image(picture: Picture, rules: Rules) -> None:
    same = replace(rules.video, min_pixels=rules.image.min_pixels, max_pixels=rules.image.max_pixels)
    image = picture(100, 60, 3)
    assert np.array_equal(video_patches([image], same).numbers(), image_patches(image, rules.image).numbers())


def test_a_pixel_row_of_a_video_is_its_patch_of_two_frames_by_channel_then_frame(
    picture: Picture, rules: Rules
) -> None:
    frames = [picture(56, 56, seed) for seed in range(3)]
    same = replace(rules.video, min_pixels=3136, max_pixels=3136)
    patches = video_patches(frames, same)
    assert (patches.grid.frames, patches.grid.height, patches.grid.width) == (2, 4, 4)
    rows = patches.numbers().reshape(2, 16, 3, 2, 14, 14)
    pixels = np.stack([np.asarray(frame, np.float64) for frame in [*frames, frames[2]]])  # the last frame fills up
    normal = (pixels / 255 - np.array(same.mean)) / np.array(same.std)
    # Row 6 of a 4 x 4 grid in blocks of 2 x 2: block (0, 1), patch (1, 0) of it: patch row 1, patch column 2.
    for time, frame in ((0, 0), (0, 1), (1, 2), (1, 3)):
        wanted = normal[frame, 14:28, 28:42].transpose(2, 0, 1)
        assert np.allclose(rows[time, 6, :, frame % 2], wanted, atol=1e-6)


def test_a_video_that_fills_the_whole_budget_gets_smaller_frames(rules: Rules) -> None:
    free = video_grid(400, 1080, 1920, rules.video)
    capped = video_grid(400, 1080, 1920, replace(rules.video, cap_tokens=20_000))
    assert free.rows > capped.rows
    assert capped.tokens(2) <= 20_000


@pytest.mark.parametrize("size", [(201, 1), (1, 201), (4020, 20)])
def test_an_image_wider_than_200_to_1_is_refused(size: tuple[int, int], rules: Rules) -> None:
    with pytest.raises(DataError, match="200:1"):
        image_grid(*size, rules.image)


@pytest.mark.parametrize("size", [(1, 1), (3, 500), (200, 1), (10, 1990), (5000, 5000), (29, 4001)])
def test_sizes_are_those_of_transformers(size: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as theirs

    for bounds in ((3136, 12_845_056), (3136, 3136), (100_000, 200_000)):
        assert smart_resize(*size, 28, *bounds) == theirs.smart_resize(*size, 28, *bounds)
