"""From upright RGB frames to the pixel rows that the vision tower of Qwen2.5-VL takes.

A pixel row is one patch of `temporal_patch` frames: [channel, frame, y, x] flattened, float32. Rows are ordered by
(time, block row, block column, row in block, column in block), a block being the merge x merge patches of one token.
Bytes stay bytes (`Patches.raw`) until they are written into a segment: normalisation is a table of 256 numbers a
channel, computed as transformers computes it (Qwen2VLImageProcessorPil: float64 product, rounded to float32, then
float32).

Knows nothing of files, rows or tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from PIL import Image

from rollplex.data.processor import PixelRules
from rollplex.errors import DataError

MAX_RATIO = 200

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class Grid(Struct, frozen=True, kw_only=True):
    """Patches of one image or video in time, height and width."""

    frames: int
    height: int
    width: int

    @property
    def rows(self) -> int:
        """Pixel rows."""
        return self.frames * self.height * self.width

    def tokens(self, merge: int) -> int:
        """Placeholder tokens in the prompt."""
        return self.rows // merge**2


class Patches(Struct, frozen=True, kw_only=True, eq=False):
    """One image or video, patched, not yet normalised."""

    grid: Grid
    raw: Bytes
    """[rows, 3, 1 or temporal_patch, patch, patch]; 1: the frame is repeated."""
    rules: PixelRules

    @property
    def row_width(self) -> int:
        return 3 * self.rules.temporal_patch * self.rules.patch**2

    def write(self, out: Floats) -> None:
        """Normalise into `out`, float32 [rows, row_width]."""
        rules = self.rules
        target = out.reshape(self.grid.rows, 3, rules.temporal_patch, rules.patch, rules.patch)
        for channel, table in enumerate(normalisation(rules)):
            target[:, channel] = table[self.raw[:, channel]]

    def numbers(self) -> Floats:
        """The normalised pixel rows, float32 [rows, row_width]."""
        out = np.empty((self.grid.rows, self.row_width), np.float32)
        self.write(out)
        return out


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width after scaling: multiples of `factor`, their product within the bounds, the ratio about kept.

    As `smart_resize` of transformers' Qwen2-VL, whose arithmetic on floats is kept step by step.

    Raises:
        DataError: an image wider or higher than 200:1.
    """
    if max(height, width) > MAX_RATIO * min(height, width):
        raise DataError(
            "This image is too narrow for the model",
            got=f"{width} x {height}",
            needed=f"a ratio of at most {MAX_RATIO}:1",
            do="Crop it.",
        )
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    if high * wide > max_pixels:
        beta = math.sqrt((height * width) / max_pixels)
        high = max(factor, math.floor(height / beta / factor) * factor)
        wide = max(factor, math.floor(width / beta / factor) * factor)
    elif high * wide < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        high = math.ceil(height * beta / factor) * factor
        wide = math.ceil(width * beta / factor) * factor
    return high, wide


def image_grid(height: int, width: int, rules: PixelRules) -> Grid:
    """The grid of an image of this size. Raises DataError as `smart_resize`."""
    high, wide = smart_resize(height, width, rules.factor, rules.min_pixels, rules.max_pixels)
    return Grid(frames=1, height=high // rules.patch, width=wide // rules.patch)


def video_grid(num_frames: int, height: int, width: int, rules: PixelRules) -> Grid:
    """The grid of a video; a last incomplete group of frames is filled with its last frame, as transformers does."""
    max_pixels = rules.max_pixels
    if rules.cap_tokens:
        total = int(rules.cap_tokens * rules.factor**2 * 0.9)
        max_pixels = max(min(max_pixels, total * rules.temporal_patch // num_frames), int(rules.min_pixels * 1.05))
    high, wide = smart_resize(height, width, rules.factor, rules.min_pixels, max_pixels)
    groups = -(-num_frames // rules.temporal_patch)
    return Grid(frames=groups, height=high // rules.patch, width=wide // rules.patch)


def image_patches(image: Image.Image, rules: PixelRules) -> Patches:
    """Scale and patch one image of mode RGB."""
    grid = image_grid(image.height, image.width, rules)
    return Patches(grid=grid, raw=_cut(_scaled(image, grid, rules)[None], grid, rules), rules=rules)


def frame_patches(frames: Iterable[Image.Image], grid: Grid, rules: PixelRules) -> Patches:
    """Scale and patch the frames of one video, each as it comes, all of mode RGB.

    transformers scales video frames with torchvision, images with Pillow; here both are scaled with Pillow, so that one
    video frame twice is the image.

    Args:
        frames: as many as the grid was made for.
        grid: of `video_grid`.
        rules: of videos.
    """
    scaled = [_scaled(frame, grid, rules) for frame in frames]
    scaled += [scaled[-1]] * (grid.frames * rules.temporal_patch - len(scaled))
    return Patches(grid=grid, raw=_cut(np.stack(scaled), grid, rules), rules=rules)


def normalisation(rules: PixelRules) -> Floats:
    """[3, 256]: what a byte becomes in each channel: (byte * rescale - mean) / std, rounded as transformers rounds."""
    scaled = (np.arange(256, dtype=np.float64) * rules.rescale).astype(np.float32)
    mean, std = np.array(rules.mean, np.float32)[:, None], np.array(rules.std, np.float32)[:, None]
    table: Floats = (scaled - mean) / std
    return table


def _scaled(image: Image.Image, grid: Grid, rules: PixelRules) -> Bytes:
    """[height, width, 3]"""
    size = (grid.width * rules.patch, grid.height * rules.patch)
    return np.asarray(image.resize(size, resample=Image.Resampling(rules.resample)))


def _cut(frames: Bytes, grid: Grid, rules: PixelRules) -> Bytes:
    """[frames, height, width, 3] to [rows, 3, frames per row, patch, patch]."""
    merge, patch = rules.merge, rules.patch
    per_row = frames.shape[0] // grid.frames
    blocks = frames.reshape(
        grid.frames, per_row, grid.height // merge, merge, patch, grid.width // merge, merge, patch, 3
    )  # time, frame, block row, row in block, y, block column, column in block, x, channel
    rows = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return np.ascontiguousarray(rows).reshape(grid.rows, 3, per_row, patch, patch)
