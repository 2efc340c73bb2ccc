"""Reads the JSONL files that a run leaves. Knows nothing of what their rows mean."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias, cast

from rollplex.errors import DataError

Row: TypeAlias = Mapping[str, object]


def read_rows(file: Path, *, having: str = "") -> Iterator[Row]:
    """The JSON objects of a file, one a line; none if the run did not get so far. A last line cut short is left out.

    Args:
        having: lines without this text are passed over unread, which saves most of the time in a long file.

    Raises:
        DataError: a line is not a JSON object, or lacks its number.
    """
    if not file.is_file():
        return
    with file.open(encoding="utf-8") as lines:
        for count, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                return
            if having in line:
                yield _parse(line, f"{file}:{count}")


def number(row: Row, key: str, *, where: str) -> float:
    """A number of a row.

    Raises:
        DataError: it is not there, or is no number.
    """
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError("A row lacks a number", got=repr(value), needed=key, where=where)
    return float(value)


def _parse(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError("A line is not JSON", got=str(error), where=where) from None
    if not isinstance(row, dict):
        raise DataError("A line is not a JSON object", got=line.strip()[:80], where=where)
    return cast("Row", row)
