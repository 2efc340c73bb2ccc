"""Typed access to the JSON files of a model folder.

Owns: reading a file, checking the form of one field, naming file and field in the error. Does not know: what a field
means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from rollplex.errors import ModelError


def load(file: Path) -> dict[str, object]:
    """The JSON object in `file`. Raises ModelError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            "A model file cannot be read",
            got=str(error),
            needed="a JSON object",
            do="Point the configuration at a folder that from_pretrained opens.",
            where=str(file),
        ) from error
    if not isinstance(content, dict):
        raise ModelError(
            "A model file has the wrong form", got=type(content).__name__, needed="object", where=str(file)
        )
    return cast("dict[str, object]", content)


class Fields:
    """One JSON object with typed access; errors name file and field."""

    def __init__(self, values: Mapping[str, object], origin: str, path: str = "") -> None:
        self._values = values
        self._origin = origin
        self._path = path

    def where(self, name: str) -> str:
        return f"{self._origin}: {self._path}{name}"

    def get(self, name: str) -> object:
        return self._values.get(name)

    def section(self, *names: str) -> Fields:
        """The first of these objects that is there. Absent: an error for one name, empty for alternatives."""
        for name in names:
            value = self.get(name)
            if isinstance(value, dict):
                return Fields(cast("dict[str, object]", value), self._origin, f"{self._path}{name}.")
            if value is not None:
                raise self._wrong(name, value, "an object")
        if len(names) == 1:
            raise self._wrong(names[0], None, "an object")
        return Fields({}, self._origin, f"{self._path}{names[0]}.")

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number; sizes must be positive, ids (…_id) may be 0."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        least = 0 if name.endswith("_id") else 1
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**40:
            raise self._wrong(name, value, f"a whole number from {least}")
        return value

    def side(self, name: str, default: int) -> int:
        """A whole number, or a list that repeats one."""
        value = self.get(name)
        if isinstance(value, list):
            sides = set(self.wholes(name))
            if len(sides) != 1 or 0 in sides:
                raise self._wrong(name, value, "one positive number, or the same number twice")
            return sides.pop()
        return self.whole(name, default)

    def wholes(self, name: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**40 for item in value):
            raise self._wrong(name, value, "a list of whole numbers")
        return tuple(value)

    def number(self, name: str, default: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self._wrong(name, value, "a positive number")
        return float(value)

    def _wrong(self, name: str, value: object, needed: str) -> ModelError:
        what = "A field is missing" if value is None else "A field has the wrong form"
        return ModelError(what, got="" if value is None else repr(value), needed=needed, where=self.where(name))
