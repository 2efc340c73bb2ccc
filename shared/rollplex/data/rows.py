"""Rows of a JSONL dataset: one JSON object a line, found by byte offset, checked strictly.

    prompt      text, or a conversation: [{"role": …, "content": text or parts}, …]           required
    images      paths relative to the image folder, in the order of their placeholders        optional
    image       one path; the same as "images": [path]                                        optional
    videos      for each video the paths of its frames                                        optional
    video_fps   frames per second of the frames listed: a number, or one for each video (2)   optional
    …           any further column goes to the reward functions

Row numbers count lines from 0. Blank lines are allowed at the end only. Owns reading and the form of a row; does not
know image files, templates or tokens.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import numpy.typing as npt

from rollplex.data.columns import columns_of
from rollplex.data.files import open_regular
from rollplex.data.renames import rename_to_prompt
from rollplex.errors import DataError

MAX_LINE_BYTES = 16 * 2**20
MAX_MEDIA = 1024
MAX_FRAMES = 4096
DEFAULT_FPS = 2.0
"""As transformers' and Qwen's processors assume."""
RESERVED = ("prompts", "completions", "completion_ids")
_CHUNK_BYTES = 2**20


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row, its form checked."""

    number: int
    prompt: str | list[dict[str, object]]
    images: tuple[str, ...]
    videos: tuple[tuple[str, ...], ...]
    video_fps: tuple[float, ...]
    """One for each video."""
    columns: dict[str, object]
    """Everything but the prompt, as it stands in the file."""


class Rows:
    """A JSONL file with an index of byte offsets. Reading a row costs one pread.

    Args:
        path: a regular file in UTF-8.

    Raises:
        DataError: it cannot be opened, or has no rows.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = open_regular(path)
        self._stamp = self._state()
        self._starts, self._ends, self.digest = _index(self._fd)
        if not len(self._starts):
            raise DataError("This dataset has no rows", needed="at least one", where=str(path))

    def __len__(self) -> int:
        return len(self._starts)

    def close(self) -> None:
        os.close(self._fd)

    def where(self, number: int) -> str:
        """A row as errors name it."""
        return f"{self._path}:{number + 1} (row {number})"

    def line(self, number: int) -> bytes:
        """The bytes of a row.

        Raises:
            DataError: no such row, a line that is too long, or a file that changed since it was opened.
        """
        if not 0 <= number < len(self):
            needed = f"0 to {len(self) - 1}"
            raise DataError("There is no such row", got=str(number), needed=needed, where=str(self._path))
        start, end = int(self._starts[number]), int(self._ends[number])
        if end - start > MAX_LINE_BYTES:
            raise DataError(
                "This row is too long",
                got=f"{end - start} bytes",
                needed=f"at most {MAX_LINE_BYTES}",
                where=self.where(number),
            )
        data = os.pread(self._fd, end - start, start)
        if self._state() != self._stamp:
            raise DataError("The dataset changed during the run", do="Start again.", where=str(self._path))
        return data

    def row(self, number: int) -> Row:
        """Read and check one row. Raises DataError naming file, line and row."""
        data = self.line(number)
        try:
            return parse(data, number)
        except DataError as error:
            raise located(error, self.where(number)) from error

    def _state(self) -> tuple[int, int]:
        now = os.fstat(self._fd)
        return now.st_size, now.st_mtime_ns


def located(error: DataError, where: str) -> DataError:
    """The same error, with the row in front of whatever place it named."""
    place = f"{where}: {error.where}" if error.where else where
    return DataError(error.what, got=error.got, needed=error.needed, do=error.do, where=place)


def parse(line: bytes, number: int) -> Row:
    """Check one line. Raises DataError that says what is wrong, not where."""
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        got = "an empty line" if not line.strip() else str(error)
        got = "a byte-order mark" if line.startswith(b"\xef\xbb\xbf") else got
        raise DataError("This line is not JSON", got=got, needed="one JSON object a line") from error
    if not isinstance(value, dict):
        raise DataError("This row is not an object", got=_kind(value), needed='{"prompt": …}')
    fields = cast("dict[str, object]", value)
    for name in RESERVED:
        if name in fields:
            raise DataError(f"A column is called {name!r}", needed="another name; reward functions get this one anyway")
    videos = _videos(fields.get("videos"))
    return Row(
        number=number,
        prompt=_prompt(fields),
        images=_images(fields),
        videos=videos,
        video_fps=_fps(fields.get("video_fps"), len(videos)),
        columns=columns_of(fields),
    )


def _prompt(fields: Mapping[str, object]) -> str | list[dict[str, object]]:
    prompt = fields.get("prompt")
    if prompt is None:
        raise DataError(
            "This row has no prompt", got=f"columns {sorted(fields)}", needed='"prompt"', do=rename_to_prompt(fields)
        )
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError("The prompt is empty", got=repr(prompt))
        return prompt
    if not isinstance(prompt, list):
        raise DataError("The prompt has the wrong form", got=_kind(prompt), needed="text, or a list of messages")
    messages = [_message(item, index) for index, item in enumerate(prompt)]
    if not any(_says_something(message["content"]) for message in messages):
        raise DataError("The prompt is empty", got=f"{len(messages)} messages without content")
    if messages[-1]["role"] == "assistant":
        raise DataError("The last message is the assistant's", needed="a message for it to answer")
    return messages


def _message(value: object, index: int) -> dict[str, object]:
    name = f"message {index}"
    if not isinstance(value, dict):
        raise DataError(f"{name} is not an object", got=_kind(value), needed='{"role": …, "content": …}')
    message = {key: item for key, item in cast("dict[str, object]", value).items() if item is not None}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise DataError(f"{name} has no role", got=_kind(role), needed='"system", "user", "assistant" or "tool"')
    if isinstance(content, list):
        message["content"] = [_part(item, f"{name}, part {part}") for part, item in enumerate(content)]
    elif not isinstance(content, str):
        raise DataError(f"{name} has no content", got=_kind(content), needed="text, or a list of parts")
    return message


def _part(value: object, name: str) -> dict[str, object]:
    part = {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else None
    if part is None or part.get("type") not in {"text", "image", "video"}:
        got = _kind(value) if part is None else f"type {part.get('type')!r}"
        raise DataError(f"{name} is of no known type", got=got, needed='"text", "image" or "video"')
    if part["type"] == "text":
        if not isinstance(part.get("text"), str):
            raise DataError(f"{name} has no text", got=_kind(part.get("text")), needed='{"type": "text", "text": …}')
    elif len(part) > 1:
        raise DataError(
            f"{name} names its file itself",
            got=f"keys {sorted(part)}",
            needed=f'{{"type": "{part["type"]}"}}, and the path in the column "{part["type"]}s"',
        )
    return part


def _says_something(content: object) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    parts = cast("list[dict[str, object]]", content)
    return any(part["type"] != "text" or str(part["text"]).strip() for part in parts)


def _images(fields: Mapping[str, object]) -> tuple[str, ...]:
    single, several = fields.get("image"), fields.get("images")
    if single is None:
        return _paths(several, "images", MAX_MEDIA)
    if several is not None:
        raise DataError('This row has both "image" and "images"', needed="one of them")
    return _paths([single], "image", 1)


def _videos(value: object) -> tuple[tuple[str, ...], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_MEDIA:
        raise DataError('"videos" has the wrong form', got=_kind(value), needed="a list of lists of frames' paths")
    videos = tuple(_paths(item, f"videos[{index}]", MAX_FRAMES) for index, item in enumerate(value))
    if not all(videos):
        raise DataError("A video has no frames", got=f"videos[{videos.index(())}] is empty", needed="one path a frame")
    return videos


def _paths(value: object, name: str, most: int) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise DataError(f'"{name}" has the wrong form', got=_kind(value), needed="a list of paths")
    if len(value) > most:
        raise DataError(f'"{name}" is too long', got=str(len(value)), needed=f"at most {most}")
    return tuple(value)


def _fps(value: object, num_videos: int) -> tuple[float, ...]:
    values: Sequence[object] = value if isinstance(value, list) else [value] * num_videos
    if len(values) != num_videos:
        raise DataError('"video_fps" does not fit the videos', got=str(len(values)), needed=f"{num_videos} or a number")
    numbers = [DEFAULT_FPS if item is None else item for item in values]
    for number in numbers:
        if not isinstance(number, int | float) or isinstance(number, bool) or not 1e-3 <= number <= 1e3:
            raise DataError('"video_fps" cannot be used', got=repr(number), needed="a number from 0.001 to 1000")
    return tuple(float(cast("float", number)) for number in numbers)


def _kind(value: object) -> str:
    """A value as an error shows it: its JSON type, and a short look."""
    if value is None:
        return "nothing"
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    look = repr(value)
    return f"{names.get(type(value), type(value).__name__)}: {look if len(look) <= 80 else look[:77] + '…'}"


def _index(fd: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], bytes]:
    """Start and end of each line, blank ones at the end of the file left out; and a digest of all bytes."""
    digest = hashlib.blake2b(digest_size=32)
    breaks: list[npt.NDArray[np.int64]] = []
    at, last_word = 0, -1
    while chunk := os.pread(fd, _CHUNK_BYTES, at):
        digest.update(chunk)
        breaks.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + at)
        stripped = chunk.rstrip(b" \t\r\n")
        last_word = at + len(stripped) if stripped else last_word
        at += len(chunk)
    ends = np.concatenate([*breaks, np.array([at])]) if breaks else np.zeros(0, np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1]) if len(ends) else ends
    kept = starts < last_word
    return starts[kept], ends[kept], digest.digest()
