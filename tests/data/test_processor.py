"""The preprocessor files of a model folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rollplex.data.processor import read_rules
from rollplex.errors import ConfigError, ModelError
from rollplex.layout.shape import ModelShape


def folder_with(target: Path, model: Path, **files: dict[str, Any] | None) -> Path:
    shutil.copytree(model, target)
    for name, content in files.items():
        path = target / f"{name}.json"
        path.unlink(missing_ok=True) if content is None else path.write_text(json.dumps(content))
    return target


def test_numbers_are_those_of_transformers(model_folder: Path, shape: ModelShape) -> None:
    theirs = Qwen2VLImageProcessorPil.from_pretrained(model_folder)
    ours = read_rules(model_folder, shape).image
    assert (ours.min_pixels, ours.max_pixels) == (theirs.size["shortest_edge"], theirs.size["longest_edge"])
    assert (ours.mean, ours.std) == (tuple(theirs.image_mean), tuple(theirs.image_std))
    assert (ours.rescale, ours.resample) == (theirs.rescale_factor, theirs.resample)
    assert (ours.patch, ours.temporal_patch, ours.merge) == (14, 2, 2)


def test_what_transformers_saves_is_read_back(model_folder: Path, shape: ModelShape, tmp_path: Path) -> None:
    theirs = Qwen2VLImageProcessorPil(min_pixels=5000, max_pixels=60_000, image_mean=[0.5, 0.4, 0.3])
    folder = folder_with(tmp_path / "m", model_folder)
    theirs.save_pretrained(folder)
    ours = read_rules(folder, shape).image
    assert (ours.min_pixels, ours.max_pixels, ours.mean) == (5000, 60_000, (0.5, 0.4, 0.3))


def test_the_nested_file_comes_first_and_videos_fall_back_to_the_images(
    model_folder: Path, shape: ModelShape, tmp_path: Path
) -> None:
    assert read_rules(model_folder, shape).video.max_pixels == 12_845_056
    video = {"size": {"shortest_edge": 4000, "longest_edge": 90_000}, "cap_pixels_per_frame": True}
    folder = folder_with(tmp_path / "a", model_folder, video_preprocessor_config=video)
    rules = read_rules(folder, shape)
    assert (rules.video.min_pixels, rules.video.max_pixels, rules.video.cap_tokens) == (4000, 90_000, 128_000)
    nested = {"image_processor": {"max_pixels": 70_000}, "video_processor": {}}
    folder = folder_with(
        tmp_path / "b", model_folder, video_preprocessor_config=video, processor_config=nested, preprocessor_config=None
    )
    rules = read_rules(folder, shape)
    assert (rules.image.min_pixels, rules.image.max_pixels) == (3136, 70_000)
    assert (rules.video.min_pixels, rules.video.max_pixels, rules.video.cap_tokens) == (128 * 784, 768 * 784, 0)


@pytest.mark.parametrize(
    "content",
    [
        None,
        {"do_resize": False},
        {"do_normalize": 0},
        {"patch_size": 16},
        {"temporal_patch_size": 1},
        {"min_pixels": "3136"},
        {"min_pixels": 9000, "max_pixels": 8000},
        {"max_pixels": 100},
        {"image_mean": [0.5]},
        {"image_mean": [0.5, 0.5, True]},
        {"image_std": [0.5, 0.5, 0.0]},
        {"rescale_factor": "x"},
        {"resample": 9},
    ],
)
def test_a_processor_that_cannot_be_followed_is_refused(
    content: dict[str, Any] | None, model_folder: Path, shape: ModelShape, tmp_path: Path
) -> None:
    with pytest.raises(ModelError):
        read_rules(folder_with(tmp_path / "m", model_folder, preprocessor_config=content), shape)


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({}, (3136, 12_845_056)),
        ({"min_pixels": 5000}, (5000, 12_845_056)),
        ({"max_pixels": 90_000}, (3136, 90_000)),
        ({"min_pixels": 5000, "max_pixels": 90_000}, (5000, 90_000)),
        ({"max_pixels": 2000}, (2000, 2000)),
        ({"min_pixels": 20_000_000}, (20_000_000, 20_000_000)),
    ],
)
def test_the_configurations_bounds_go_before_the_models_for_images_and_videos(
    given: dict[str, int], bounds: tuple[int, int], model_folder: Path, shape: ModelShape
) -> None:
    rules = read_rules(model_folder, shape, **given)
    assert (rules.image.min_pixels, rules.image.max_pixels) == bounds
    assert (rules.video.min_pixels, rules.video.max_pixels) == bounds


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"min_pixels": 5001, "max_pixels": 5000},
            "No image could have so many pixels; got min_pixels 5001, max_pixels",
        ),
        ({"max_pixels": 783}, "got min_pixels 783, max_pixels 783; needed min_pixels <= max_pixels, and at least 784"),
    ],
)
def test_bounds_between_which_there_is_no_size_are_refused(
    given: dict[str, int], says: str, model_folder: Path, shape: ModelShape
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_rules(model_folder, shape, **given)
    assert says in str(caught.value)
    assert caught.value.where == "data.max_pixels"
