"""Real photographs at a size that gives an exact number of vision tokens. Knows no rows and no models but their rules.

The pixels are those of scikit-learn's two sample photographs (the extra `bench`), another crop for every picture,
scaled to its size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from rollplex.data.patches import MAX_RATIO, image_grid
from rollplex.data.processor import PixelRules
from rollplex.errors import ConfigError, DataError

_STEPS = 5
"""Crops of one size along a photograph's diagonal."""
_PART = 0.85
"""Of the photograph's height or width, whichever limits: less than 1, so that every ratio has room to move."""


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
    photographs = _photographs()
    for number in range(num_pictures):
        photograph = photographs[number % len(photographs)]
        yield _crop(photograph, number // len(photographs), width, height)


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
