"""How a model wants its images and videos: sizes, means, patch sides, from the preprocessor files of its folder.

Owns which file and field give which number, with the precedence and defaults of transformers (5.12 to 5.24:
`Qwen2VLImageProcessor`, `Qwen2VLVideoProcessor`). Does not know pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from msgspec import Struct
from msgspec.structs import replace

from rollplex.errors import ConfigError, ModelError
from rollplex.layout.fields import load
from rollplex.layout.shape import ModelShape
from rollplex.layout.vision import VisionShape

NESTED_FILE = "processor_config.json"
IMAGE_FILE = "preprocessor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
MAX_VIDEO_TOKENS = 128_000


class PixelRules(Struct, frozen=True, kw_only=True):
    """How frames become pixel rows. `min_pixels` and `max_pixels` bound width x height after scaling."""

    patch: int
    temporal_patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    """Of red, green and blue after `rescale`."""
    std: tuple[float, float, float]
    rescale: float
    """Factor from 0 … 255 to the range of `mean`."""
    resample: int
    """Pillow's number of the filter; 3 is bicubic."""
    cap_tokens: int = 0
    """Videos: all frames together get at most 90 % of so many tokens' pixels. 0: only max_pixels per frame."""

    @property
    def factor(self) -> int:
        """Width and height after scaling are multiples of this."""
        return self.patch * self.merge


class Rules(Struct, frozen=True, kw_only=True):
    """Of one model."""

    image: PixelRules
    video: PixelRules


def read_rules(folder: Path, shape: ModelShape, *, min_pixels: int = 0, max_pixels: int = 0) -> Rules:
    """Read the rules of a model folder.

    Images: `image_processor` in processor_config.json, else preprocessor_config.json. Videos: `video_processor` in
    processor_config.json, else video_preprocessor_config.json, else preprocessor_config.json.

    Args:
        folder: of the model.
        shape: of the model.
        min_pixels, max_pixels: in place of what the files say, for images and frames of videos; 0: as they say.

    Raises:
        ModelError: no such file, a field of the wrong form, a step that Qwen2.5-VL's processors do not skip, or sides
            that contradict config.json.
        ConfigError: bounds between which there is no size.
    """
    nested = load(folder / NESTED_FILE) if (folder / NESTED_FILE).is_file() else {}
    image = _find(folder, nested, "image_processor", IMAGE_FILE)
    video = _find(folder, nested, "video_processor", VIDEO_FILE, IMAGE_FILE)
    rules = Rules(
        image=_rules(*image, shape.vision, min_pixels=56 * 56, max_pixels=28 * 28 * 1280),
        video=_rules(*video, shape.vision, min_pixels=128 * 28 * 28, max_pixels=28 * 28 * 768),
    )
    return Rules(
        image=_bounded(rules.image, min_pixels, max_pixels), video=_bounded(rules.video, min_pixels, max_pixels)
    )


def _bounded(rules: PixelRules, min_pixels: int, max_pixels: int) -> PixelRules:
    """The rules with other bounds. A bound that is not given gives way to the other one."""
    least = min_pixels or (min(rules.min_pixels, max_pixels) if max_pixels else rules.min_pixels)
    most = max_pixels or max(rules.max_pixels, min_pixels)
    if least > most or most < rules.factor**2:
        raise ConfigError(
            "No image could have so many pixels",
            got=f"min_pixels {least}, max_pixels {most}",
            needed=f"min_pixels <= max_pixels, and at least {rules.factor**2}, one token of this model",
            where="data.max_pixels",
        )
    return replace(rules, min_pixels=least, max_pixels=most)


def _find(folder: Path, nested: Mapping[str, object], key: str, *files: str) -> tuple[Mapping[str, object], str]:
    value = nested.get(key)
    if isinstance(value, dict):
        return cast("dict[str, object]", value), f"{folder / NESTED_FILE}: {key}"
    for name in files:
        if (folder / name).is_file():
            return load(folder / name), str(folder / name)
    raise ModelError(
        "The model folder does not say how images are scaled",
        needed=f"{NESTED_FILE} or {IMAGE_FILE}",
        do="Copy the processor files of the model that it was made from.",
        where=str(folder),
    )


def _rules(
    values: Mapping[str, object], where: str, vision: VisionShape, *, min_pixels: int, max_pixels: int
) -> PixelRules:
    for step in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if values.get(step) is not None and values.get(step) is not True:
            raise _wrong(where, step, values.get(step), "true; other processors are not supported")
    for name, side in (
        ("patch_size", vision.patch),
        ("temporal_patch_size", vision.temporal_patch),
        ("merge_size", vision.merge),
    ):
        if values.get(name) is not None and values.get(name) != side:
            raise _wrong(where, name, values.get(name), f"{side}, as config.json says")
    size = values.get("size")
    edges = cast("dict[str, object]", size) if isinstance(size, dict) else {}
    rules = PixelRules(
        patch=vision.patch,
        temporal_patch=vision.temporal_patch,
        merge=vision.merge,
        min_pixels=_whole(values.get("min_pixels"), _whole(edges.get("shortest_edge"), min_pixels, where), where),
        max_pixels=_whole(values.get("max_pixels"), _whole(edges.get("longest_edge"), max_pixels, where), where),
        mean=_three(values, "image_mean", CLIP_MEAN, where),
        std=_three(values, "image_std", CLIP_STD, where),
        rescale=_number(values.get("rescale_factor"), 1 / 255, "rescale_factor", where),
        resample=_whole(values.get("resample"), 3, where),
        cap_tokens=_whole(values.get("max_video_tokens"), MAX_VIDEO_TOKENS, where)
        if values.get("cap_pixels_per_frame") is True
        else 0,
    )
    if rules.min_pixels > rules.max_pixels or rules.max_pixels < rules.factor**2 or rules.resample > 5:
        raise _wrong(where, "size", str(rules), f"min <= max, max >= {rules.factor**2}, resample 0 to 5")
    return rules


def _whole(value: object, default: int, where: str) -> int:
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**40:
        raise _wrong(where, "size, min_pixels, max_pixels, resample or max_video_tokens", value, "a whole number")
    return value


def _number(value: object, default: float, name: str, where: str) -> float:
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise _wrong(where, name, value, "a number")
    return float(value)


def _three(
    values: Mapping[str, object], name: str, default: tuple[float, float, float], where: str
) -> tuple[float, float, float]:
    value = values.get(name)
    if value is None:
        return default
    if not isinstance(value, list) or len(value) != 3:
        raise _wrong(where, name, value, "three numbers")
    red, green, blue = (_number(item, 0.0, name, where) for item in value)
    if name == "image_std" and min(red, green, blue) <= 0:
        raise _wrong(where, name, value, "three positive numbers")
    return red, green, blue


def _wrong(where: str, name: str, value: object, needed: str) -> ModelError:
    return ModelError(
        "A field of the processor cannot be used", got=repr(value), needed=needed, where=f"{where}: {name}"
    )
