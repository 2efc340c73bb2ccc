"""What a row says about its images and videos, made uniform; nothing is opened here.

    a path, relative to the image folder        "images/0001.png", {"path": …}, {"image": …}
    the file itself, in the row                  {"bytes": raw or base64}, raw bytes, "data:image/png;base64,…"
    one or several                               a value or a list of them; nothing and [] mean none

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
_VIDEO = "a list of its frames' paths"


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


def images_of(value: object, column: str) -> tuple[Place, ...]:
    """The images of a row.

    Args:
        value: of the column.
        column: its name, for errors.

    Raises:
        DataError: a form that is none of those above.
    """
    return tuple(_image(item, name) for item, name in _items(value, column, MAX_MEDIA, _IMAGE))


def clips_of(value: object, column: str, fps: object) -> tuple[Clip, ...]:
    """The videos of a row, each a list of frames.

    Args:
        value: of the column.
        column: its name, for errors.
        fps: of "video_fps": a number, one for each video, or nothing.

    Raises:
        DataError: a form that is none of those above.
    """
    if value is None:
        return _paced((), fps)
    if not isinstance(value, list) or len(value) > MAX_MEDIA:
        raise DataError(f'"{column}" has the wrong form', got=kind_of(value), needed="a list of lists of frames' paths")
    return _paced(tuple(_frames(item, f'"{column}"[{index}]') for index, item in enumerate(value)), fps)


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


def _frames(value: object, name: str) -> tuple[Place, ...]:
    if not isinstance(value, list):
        raise DataError(f"{name} has the wrong form", got=kind_of(value), needed=_VIDEO)
    bare = name.replace('"', "")
    frames = tuple(_image(item, f"{name}[{index}]") for index, item in enumerate(value[: MAX_FRAMES + 1]))
    if not frames:
        raise DataError("A video has no frames", got=f"{bare} is empty", needed="one path a frame")
    if len(frames) > MAX_FRAMES:
        raise DataError(f"{name} is too long", got=str(len(value)), needed=f"at most {MAX_FRAMES}")
    return frames


def _paced(videos: tuple[tuple[Place, ...], ...], fps: object) -> tuple[Clip, ...]:
    """Videos with their frames per second."""
    values = fps if isinstance(fps, list) else [fps] * len(videos)
    if len(values) != len(videos):
        raise DataError(
            '"video_fps" does not fit the videos', got=str(len(values)), needed=f"{len(videos)} or a number"
        )
    clips: list[Clip] = []
    for frames, value in zip(videos, values, strict=True):
        number = DEFAULT_FPS if value is None else value
        if not isinstance(number, int | float) or isinstance(number, bool) or not 1e-3 <= number <= 1e3:
            raise DataError('"video_fps" cannot be used', got=repr(number), needed="a number from 0.001 to 1000")
        clips.append(Clip(frames=frames, fps=float(number)))
    return tuple(clips)
