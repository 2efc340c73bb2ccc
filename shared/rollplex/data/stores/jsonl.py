"""JSON lines: one JSON object a line. Row numbers count lines from 0; blank lines are allowed at the end only."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from rollplex.data.files import open_regular
from rollplex.data.stores.base import CHUNK_BYTES, Offsets, RawRow, Spans, check_not_empty, decode_object


class JsonLines:
    """A JSONL file with an index of byte offsets.

    Args:
        path: a regular file in UTF-8.

    Raises:
        DataError: it cannot be opened, or has no rows.
    """

    form = "JSON lines"

    def __init__(self, path: Path) -> None:
        self._path = path
        fd = open_regular(path)
        starts, ends, self.digest = _index(fd)
        self._spans = Spans(fd, starts, ends, str(path))
        check_not_empty(len(starts), str(path))

    def __len__(self) -> int:
        return len(self._spans)

    def line(self, number: int) -> bytes:
        """The bytes of a row. Raises DataError as `raw`."""
        return self._spans.read(number, self.where(number))

    def raw(self, number: int) -> RawRow:
        return decode_object(self.line(number), "line", self.where(number))

    def where(self, number: int) -> str:
        return f"{self._path}:{number + 1} (row {number})"

    def close(self) -> None:
        self._spans.close()


def _index(fd: int) -> tuple[Offsets, Offsets, bytes]:
    """Start and end of each line, blank ones at the end of the file left out; and a digest of all bytes."""
    digest = hashlib.blake2b(digest_size=32)
    breaks: list[Offsets] = []
    at, last_word = 0, -1
    while chunk := os.pread(fd, CHUNK_BYTES, at):
        digest.update(chunk)
        breaks.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + at)
        stripped = chunk.rstrip(b" \t\r\n")
        last_word = at + len(stripped) if stripped else last_word
        at += len(chunk)
    ends = np.concatenate([*breaks, np.array([at])]) if breaks else np.zeros(0, np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1]) if len(ends) else ends
    kept = starts < last_word
    return starts[kept], ends[kept], digest.digest()
