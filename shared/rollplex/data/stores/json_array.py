"""JSON: one array of objects. The file is mapped and parsed once, for where each object lies; then read row by row."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import msgspec
import numpy as np

from rollplex.data.files import open_regular
from rollplex.data.stores.base import Offsets, RawRow, Spans, check_not_empty, decode_object, digest_of
from rollplex.errors import DataError


class JsonArray:
    """A JSON file.

    Args:
        path: a regular file in UTF-8.

    Raises:
        DataError: it cannot be opened, is not an array, or has no rows.
    """

    form = "JSON"

    def __init__(self, path: Path) -> None:
        self._path = path
        fd = open_regular(path)
        starts, ends = _index(fd, str(path))
        self.digest = digest_of([fd])
        self._spans = Spans(fd, starts, ends, str(path))
        check_not_empty(len(starts), str(path))

    def __len__(self) -> int:
        return len(self._spans)

    def raw(self, number: int) -> RawRow:
        where = self.where(number)
        return decode_object(self._spans.read(number, where), "row", where)

    def where(self, number: int) -> str:
        return f"{self._path} (row {number})"

    def close(self) -> None:
        self._spans.close()


def _index(fd: int, where: str) -> tuple[Offsets, Offsets]:
    """Start and end of each item. The parser's slices lie in the mapping, so their addresses tell."""
    if not os.fstat(fd).st_size:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapping:
        try:
            items = msgspec.json.decode(mapping, type=list[msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(
                "This file is not a JSON array",
                got=str(error),
                needed="[{…}, {…}, …]",
                do="If it has one object a line, that line is at fault.",
                where=where,
            ) from error
        base = np.frombuffer(mapping, np.uint8).ctypes.data
        starts = np.array([np.frombuffer(item, np.uint8).ctypes.data - base for item in items], np.int64)
        sizes = np.array([len(memoryview(item)) for item in items], np.int64)
        del items
    return starts, starts + sizes
