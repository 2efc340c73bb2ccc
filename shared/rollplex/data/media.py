"""What a row says about its images and videos, made uniform; nothing is opened here.

    a path, relative to the image folder        "images/0001.png", {"path": …}, {"image": …}
    the file itself, in the row                  {"bytes": raw or base64}, raw bytes, "data:image/png;base64,…"
    one or several                               a value or a list of them; nothing and [] mean none
    a video                                      such a file, or a list of its frames; {"video": …, "fps": …}

Owns these forms. Whether a path may be opened is the rule of `rollplex.data.files`; what is in a file, that of
`rollplex.data.images`.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import TypeAlias, cast

from msgspec import Struct

from rollplex.data.stores.base import kind_of
from rollplex.errors import DataError

MAX_MEDIA = 1024
MAX_FRAMES = 4096
DEFAULT_FPS = 2.0
"""As transformers' and Qwen's processors assume."""
_DATA_URI = re.compile(r"data:[\w.+/-]*((?:;[\w.+=-]+)*),", re.ASCII)
_IMAGE = 'a path, {"path": …} or {"bytes": …}'
_VIDEO = "the path of a file, or a list of its frames' paths"


class Embedded(Struct, frozen=True):
    """A file that the row holds itself."""

    data: bytes
    name: str
    """For errors: where in the row, or the path that came along."""


Place: TypeAlias = str | Embedded
"""Where an encoded image is: a path relative to the image folder, or the row itself."""


class Clip(Struct, frozen=True, kw_only=True):
    """A video as the frames it consists of."""

    frames: tuple[Place, ...]
    fps: float
    """Of the frames listed."""


class Footage(Struct, frozen=True, kw_only=True):
    """A video as a file."""

    place: Place
    fps: float | None = None
    """Frames to take a second; None: as the configuration says."""


Video: TypeAlias = Clip | Footage


def images_of(value: object, column: str) -> tuple[Place, ...]:
    """The images of a row.

    Args:
        value: of the column.
        column: its name, for errors.

    Raises:
        DataError: a form that is none of those above.
    """
    return tuple(_image(item, name) for item, name in _items(value, column, MAX_MEDIA, _IMAGE))


def videos_of(value: object, column: str, fps: object) -> tuple[Video, ...]:
    """The videos of a row: files, or lists of frames.

    Args:
        value: of the column. In "video" a list of texts is the frames of the one video, else each is a file.
        column: its name, for errors.
        fps: of "video_fps": a number, one for each video, or nothing.

    Raises:
        DataError: a form that is none of those above.
    """
    if column == "video" and isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = [value] if value else None
    items = _items(value, column, MAX_MEDIA, _VIDEO)
    rates = fps if isinstance(fps, list) else [fps] * len(items)
    if len(rates) != len(items):
        raise DataError('"video_fps" does not fit the videos', got=str(len(rates)), needed=f"{len(items)} or a number")
    return tuple(_video(item, name, rate) for (item, name), rate in zip(items, rates, strict=True))


def _items(value: object, column: str, most: int, needed: str) -> list[tuple[object, str]]:
    """The items of a column that holds one or several, each with its name."""
    if value is None:
        return []
    if not isinstance(value, list):
        return [(value, f'"{column}"')]
    if len(value) > most:
        raise DataError(f'"{column}" is too long', got=str(len(value)), needed=f"at most {most}")
    for index, item in enumerate(value):
        if item is None:
            raise DataError(
                f'"{column}"[{index}] is empty', got="nothing", needed=needed, do="Take it out, and its place too."
            )
    return [(item, f'"{column}"[{index}]') for index, item in enumerate(value)]


def _image(value: object, name: str) -> Place:
    match value:
        case str():
            return _embedded_uri(value, name) if value.startswith("data:") else value
        case bytes():
            return Embedded(value, name)
        case dict():
            return _image_object(cast("Mapping[str, object]", value), name)
        case _:
            raise DataError(f"{name} has the wrong form", got=kind_of(value), needed=_IMAGE)


def _image_object(fields: Mapping[str, object], name: str) -> Place:
    """{"bytes": …, "path": …} as `datasets` has it, {"image": …} as verl has it; bytes go before the path."""
    data, path = fields.get("bytes"), fields.get("path")
    path = fields.get("image") if path is None else path
    label = path if isinstance(path, str) and path else name
    match data, path:
        case bytes(), _:
            return Embedded(data, label)
        case str(), _:
            return Embedded(_decoded(data, name), label)
        case None, str():
            return _image(path, name)
        case _:
            look = kind_of({key: value for key, value in fields.items() if value is not None})
            raise DataError(f"{name} has the wrong form", got=look, needed=_IMAGE)


def _embedded_uri(uri: str, name: str) -> Embedded:
    match = _DATA_URI.match(uri)
    if match is None or not match[1].endswith(";base64"):
        raise DataError(f"{name} is a data URI that cannot be read", got=repr(uri[:60]), needed="data:…;base64,…")
    return Embedded(_decoded(uri[match.end() :], name), name)


def _decoded(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{name} is not base64", got=f"{kind_of(text)}: {error}", needed="base64") from error


def _video(value: object, name: str, rate: object) -> Video:
    """A list of frames, a file, or an object of one of them as verl and Qwen have it: {"video": …, "fps": 2}."""
    fps = _rate(rate)
    if isinstance(value, list):
        return Clip(frames=_frames(value, name), fps=DEFAULT_FPS if fps is None else fps)
    if isinstance(value, str | bytes):
        return Footage(place=_image(value, name), fps=fps)
    held = {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else {}
    if "video" in held and set(held) <= {"video", "fps", "type"} and not isinstance(held["video"], dict):
        return _video(held["video"], name, held.get("fps", rate))
    if held and set(held) <= {"bytes", "path"}:
        return Footage(place=_image_object(held, name), fps=fps)
    raise DataError(f"{name} has the wrong form", got=kind_of(value), needed=_VIDEO)


def _rate(number: object) -> float | None:
    if number is None:
        return None
    if not isinstance(number, int | float) or isinstance(number, bool) or not 1e-3 <= number <= 1e3:
        raise DataError('"video_fps" cannot be used', got=repr(number), needed="a number from 0.001 to 1000")
    return float(number)


def _frames(value: list[object], name: str) -> tuple[Place, ...]:
    if not value:
        bare = name.replace('"', "")
        raise DataError("A video has no frames", got=f"{bare} is empty", needed="one path a frame")
    if len(value) > MAX_FRAMES:
        raise DataError(f"{name} is too long", got=str(len(value)), needed=f"at most {MAX_FRAMES}")
    return tuple(_image(item, f"{name}[{index}]") for index, item in enumerate(value))
