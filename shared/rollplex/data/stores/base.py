"""What every format of a dataset gives: raw rows by number, a name for each, and a digest of them all.

A raw row is a mapping of column names to plain values: texts, numbers, true and false, None, bytes, lists and mappings
of those (and dates and decimals, where a format has them). Owns the contract and what all formats need for it. Does not
know what a column means.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Protocol, cast

import msgspec
import numpy as np
import numpy.typing as npt

from rollplex.errors import ConfigError, DataError

CHUNK_BYTES = 2**20
MAX_ROW_BYTES = 64 * 2**20
"""Of one row of text; an image in it takes four thirds of its size."""

RawRow = dict[str, object]
Offsets = npt.NDArray[np.int64]


class RowStore(Protocol):
    """Rows of one dataset. Reading one costs about as much as the row is large, whatever its number; what is kept in
    memory between reads is bounded, whatever the size of the dataset."""

    @property
    def form(self) -> str:
        """The format, in words: "JSON lines"."""
        ...

    @property
    def digest(self) -> bytes:
        """32 bytes: of the content, not of its place or its dates."""
        ...

    def __len__(self) -> int: ...

    def raw(self, number: int) -> RawRow:
        """One row.

        Raises:
            DataError: no such row, one that cannot be read, or a dataset that changed since it was opened; says where.
        """
        ...

    def where(self, number: int) -> str:
        """A row as errors name it."""
        ...

    def close(self) -> None: ...


class Stamp:
    """Notices that one of the files of a dataset changed."""

    def __init__(self, fds: Sequence[int], where: str) -> None:
        self._fds = tuple(fds)
        self._where = where
        self._seen = self._state()

    def check(self) -> None:
        """Raises DataError if a file is not what it was."""
        if self._state() != self._seen:
            raise DataError("The dataset changed during the run", do="Start again.", where=self._where)

    def _state(self) -> list[tuple[int, int]]:
        return [(now.st_size, now.st_mtime_ns) for now in map(os.fstat, self._fds)]


def digest_of(fds: Sequence[int]) -> bytes:
    """Of all bytes of the files, in this order. 32 bytes."""
    digest = hashlib.blake2b(digest_size=32)
    for fd in fds:
        at = 0
        while chunk := os.pread(fd, CHUNK_BYTES, at):
            digest.update(chunk)
            at += len(chunk)
    return digest.digest()


def check_number(number: int, total: int, where: str) -> None:
    """Raises DataError if there is no such row."""
    if not 0 <= number < total:
        raise DataError("There is no such row", got=str(number), needed=f"0 to {total - 1}", where=where)


def check_not_empty(total: int, where: str) -> None:
    """Raises DataError if there are no rows."""
    if not total:
        raise DataError("This dataset has no rows", needed="at least one", where=where)


def decode_object(data: bytes, what: str, where: str = "") -> RawRow:
    """A row that is text.

    Args:
        data: UTF-8.
        what: "line" or "row", as an error calls it.
        where: of the row.

    Raises:
        DataError: not JSON, or not an object.
    """
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        got = "an empty line" if not data.strip() else str(error)
        got = "a byte-order mark" if data.startswith(b"\xef\xbb\xbf") else got
        raise DataError(f"This {what} is not JSON", got=got, needed=f"one JSON object a {what}", where=where) from error
    if not isinstance(value, dict):
        raise DataError("This row is not an object", got=kind_of(value), needed='{"prompt": …}', where=where)
    return cast("RawRow", value)


def kind_of(value: object) -> str:
    """A value as an error shows it: its type, and a short look."""
    if value is None:
        return "nothing"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    look = repr(value[:100] if isinstance(value, str) else value)
    return f"{names.get(type(value), type(value).__name__)}: {look if len(look) <= 80 else look[:77] + '…'}"


def missing_extra(what: str, package: str, extra: str) -> ConfigError:
    """The error for a format whose package is not installed."""
    return ConfigError(
        f"{what} needs a package that is not installed",
        got=f"no module {package!r}",
        do=f"pip install 'rollplex[{extra}]'",
    )


class Spans:
    """Rows that are texts in one file, found by byte offsets. Reading one costs one pread.

    Args:
        fd: of the file; closed by `close`.
        starts, ends: of each row.
        where: the file.
    """

    def __init__(self, fd: int, starts: Offsets, ends: Offsets, where: str) -> None:
        self._fd = fd
        self._where = where
        self._starts, self._ends = starts, ends
        self._stamp = Stamp([fd], where)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, number: int, where: str) -> bytes:
        """The bytes of a row.

        Raises:
            DataError: no such row, one that is too long, or a file that changed since it was opened.
        """
        check_number(number, len(self), self._where)
        start, end = int(self._starts[number]), int(self._ends[number])
        if end - start > MAX_ROW_BYTES:
            raise DataError(
                "This row is too long", got=f"{end - start} bytes", needed=f"at most {MAX_ROW_BYTES}", where=where
            )
        data = os.pread(self._fd, end - start, start)
        self._stamp.check()
        return data

    def close(self) -> None:
        os.close(self._fd)
