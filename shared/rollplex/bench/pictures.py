"""Real photographs at a size that gives an exact number of vision tokens. Knows no rows and no models but their rules.

The pixels are those of scikit-learn's two sample photographs (the extra `bench`), another crop for every picture,
scaled to its size; the crops come again mirrored and turned before they become very small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rollplex.data.patches import MAX_RATIO, image_grid
from rollplex.data.processor import PixelRules
from rollplex.errors import ConfigError, DataError

LARGE_PIXELS = 2**20
_STEPS = 5
"""Crops of one size along a photograph's diagonal."""
_PART = 0.85
"""Of the photograph's height or width, whichever limits: less than 1, so that every ratio has room to move."""


_CROPS = 20
_TURNS = (
    None,
    Image.Transpose.FLIP_LEFT_RIGHT,
    Image.Transpose.FLIP_TOP_BOTTOM,
    Image.Transpose.ROTATE_180,
)
"""Those that keep width and height."""


def picture_size(vision_tokens: int, rules: PixelRules) -> tuple[int, int]:
    """Width and height in pixels of a picture that the model takes, unscaled, as so many tokens; as square as can be.

    Raises:
        ConfigError: there is no such size.
    """
    for rows in range(math.isqrt(max(vision_tokens, 0)), 0, -1):
        width, height = vision_tokens // rows * rules.factor, rows * rules.factor
        if width > MAX_RATIO * height:
            continue
        if image_grid(height, width, rules).tokens(rules.merge) == vision_tokens:
            return width, height
    side = rules.factor**2
    raise ConfigError(
        "No picture gives so many vision tokens",
        got=str(vision_tokens),
        needed=f"rows times columns of one picture, from {-(-rules.min_pixels // side)} to {rules.max_pixels // side}",
        do="For example 64 or 576.",
        where="--vision-tokens",
    )


def pictures(num_pictures: int, width: int, height: int) -> Iterator[Image.Image]:
    """So many different pictures of mode RGB.

    Raises:
        DataError: scikit-learn is not installed.
    """
    album = Album()
    return (album.picture(number, width, height) for number in range(num_pictures))


class Album:
    """Pictures by number: other numbers, other pixels.

    Raises:
        DataError: scikit-learn is not installed.
    """

    def __init__(self) -> None:
        self._photographs = _photographs()

    def picture(self, number: int, width: int, height: int) -> Image.Image:
        """One picture of mode RGB."""
        photographs = self._photographs
        number, which = divmod(number, len(photographs))
        deeper, crop = divmod(number, _CROPS * len(_TURNS))
        picture = _crop(photographs[which], deeper * _CROPS + crop % _CROPS, width, height)
        turn = _TURNS[crop // _CROPS]
        return picture if turn is None else picture.transpose(turn)


def save(picture: Image.Image, folder: Path, name: str) -> str:
    """Write a picture: PNG, or JPEG above a megapixel, which decodes several times as fast. Returns the file's name."""
    if picture.width * picture.height > LARGE_PIXELS:
        file = f"{name}.jpg"
        picture.save(folder / file, quality=90)
    else:
        file = f"{name}.png"
        picture.save(folder / file)
    return file


def _crop(photograph: Image.Image, number: int, width: int, height: int) -> Image.Image:
    """Crop `number` of the photograph, of the ratio width : height; smaller after each `_STEPS` places."""
    scale = _PART ** (1 + number // _STEPS) * min(photograph.width / width, photograph.height / height)
    wide, high = max(1, round(width * scale)), max(1, round(height * scale))
    part = (number % _STEPS) / (_STEPS - 1)
    left, top = round(part * (photograph.width - wide)), round(part * (photograph.height - high))
    return photograph.crop((left, top, left + wide, top + high)).resize((width, height), Image.Resampling.BICUBIC)


def _photographs() -> list[Image.Image]:
    try:
        from sklearn.datasets import load_sample_images  # noqa: PLC0415 - an extra, and slow to import
    except ImportError:
        raise DataError(
            "The pictures come with scikit-learn, which is not installed", do="pip install 'rollplex[bench]'."
        ) from None
    bunch: Any = load_sample_images()
    return [Image.fromarray(np.asarray(image, dtype=np.uint8)) for image in bunch.images]
