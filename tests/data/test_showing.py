"""Rows as people are shown them: small, bounded, and whatever is wrong with them is said."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rollplex.data.processor import Rules
from rollplex.data.prompts import PromptMaker
from rollplex.data.showing import MAX_CHARS, MAX_SIDE, thumbnail
from rollplex.data.source import Source
from rollplex.errors import ConfigError, DataError
from rollplex.protocol.inputs import MAX_MEDIA_SHOWN, DataSource, RowShown

Dataset = Callable[..., DataSource]


@pytest.fixture
def show(dataset: Dataset, maker: PromptMaker, rules: Rules) -> Callable[[object], RowShown]:
    """show(row): as the only row of a dataset that is not checked."""
    return lambda row: Source(dataset([row]), maker, rules).show(0)


Show = Callable[[object], RowShown]


def opened(png: bytes) -> Image.Image:
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        image.load()
        return image.copy()


def test_a_row_shows_its_prompt_and_each_medium_in_its_kind_s_order(show: Show, images: Path) -> None:
    row = show({
        "prompt": "<video> then <image> and <image>?", "images": ["a.png", "b.jpg"], "videos": [["f3.png", "f1.png"]],
    })  # fmt: skip
    assert row.problem == ""
    assert row.prompt.endswith("<|vision_start|><|image_pad|><|vision_end|>?")
    assert [item.name for item in row.media] == ["image 1", "image 2", "video 1"]
    assert [(item.width, item.height) for item in row.media] == [(60, 84), (96, 48), (64, 64)]
    with Image.open(images / "a.png") as image:
        assert np.array_equal(np.asarray(opened(row.media[0].png)), np.asarray(image))
    with Image.open(images / "f3.png") as image:
        assert np.array_equal(np.asarray(opened(row.media[2].png)), np.asarray(image))


def test_large_pictures_become_small_ones_and_keep_nothing_of_their_file() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (700, 400, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    picture.info |= {"icc_profile": b"secret" * 20_000, "comment": "secret", "transparency": (0, 0, 0)}
    item = thumbnail("image 1", lambda: picture)
    assert (item.width, item.height) == (55, MAX_SIDE)
    assert len(item.png) < 3 * MAX_SIDE**2
    again = opened(item.png)
    assert (again.size, again.mode, again.info) == ((55, 96), "RGB", {})


def test_a_picture_that_cannot_be_shown_says_why_and_the_others_are_shown(show: Show, images: Path) -> None:
    (images / "broken.png").write_bytes((images / "a.png").read_bytes()[:200])
    row = show({"prompt": "<image><image><image>", "images": ["broken.png", "gone.png", "a.png"]})
    broken, gone, good = row.media
    assert (broken.png, gone.png) == (b"", b"")
    assert "This image cannot be read" in broken.problem
    assert "gone.png" in gone.problem
    assert good.png
    assert good.problem == ""


def test_a_row_that_cannot_be_read_says_why(show: Show) -> None:
    row = show({"prompt": 5})
    assert (row.prompt, row.media) == ("", ())
    assert "train.jsonl:1 (row 0)" in row.problem


def test_many_pictures_and_long_prompts_are_cut(show: Show) -> None:
    row = show({"prompt": "<image>" * 11 + "x" * MAX_CHARS, "images": ["a.png"] * 11})
    assert len(row.media) == MAX_MEDIA_SHOWN
    assert row.left_out == 11 - MAX_MEDIA_SHOWN
    assert len(row.prompt) == MAX_CHARS
    assert row.prompt.endswith("x…")


def test_texts_that_no_message_could_carry_are_escaped() -> None:
    def fail() -> Image.Image:
        raise DataError("bad name", got="a\udc80b")

    assert "a\\udc80b" in thumbnail("image 1", fail).problem


def test_a_package_that_is_missing_for_a_video_is_said_and_no_error() -> None:
    def fail() -> Image.Image:
        raise ConfigError("A video file needs av", do="Install it.")

    assert "A video file needs av" in thumbnail("video 1", fail).problem
