"""What a shape is: which columns a row must have, which hold its media, and how its prompt becomes TRL's.

Pure. Does not check what `rollplex.data.rows` checks for all shapes: roles, contents, paths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from msgspec import Struct

from rollplex.data.stores.base import kind_of
from rollplex.errors import DataError
from rollplex.protocol.inputs import ShapeName

IMAGE_COLUMNS = ("images", "image")
VIDEO_COLUMNS = ("videos", "video")
OTHER_COLUMNS = ("video_fps",)


def _same(value: object) -> object:
    return value


def _nothing(_fields: Mapping[str, object]) -> dict[str, object]:
    return {}


class Shape(Struct, frozen=True, kw_only=True):
    """One trainer's rows."""

    name: ShapeName
    needs: tuple[str, ...]
    """Columns that every row has; by them the shape is recognised."""
    prompt: str
    """The column that becomes the prompt; one of `needs`."""
    to_prompt: Callable[[object], object] = _same
    """Its value as a text or as messages ({"role": …, "content": …}). Raises DataError."""
    more: Callable[[Mapping[str, object]], dict[str, object]] = _nothing
    """Columns for reward functions that the row has in another form. A column of the row with that name goes before."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column whose meaning the shape knows."""
        return (*self.needs, *IMAGE_COLUMNS, *VIDEO_COLUMNS, *OTHER_COLUMNS)


def list_of_objects(value: object, column: str, needed: str) -> list[dict[str, object]]:
    """A column that must be a list of objects. Raises DataError naming the column."""
    if not isinstance(value, list):
        raise DataError(f'"{column}" has the wrong form', got=kind_of(value), needed=needed)
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise DataError(f'"{column}"[{index}] is not an object', got=kind_of(item), needed=needed)
    return cast("list[dict[str, object]]", value)


def split_answer(messages: list[dict[str, object]]) -> tuple[list[dict[str, object]], object]:
    """A conversation without the assistant's last message, and what that said; None if it does not end so."""
    if messages and messages[-1].get("role") == "assistant":
        return messages[:-1], messages[-1].get("content")
    return messages, None
