"""Parquet files, one or several, by pyarrow (extra `data`).

A row group can only be decoded whole. Small ones are, when one of their rows is wanted, and the newest are kept, within
a limit. If that would mean to decode much for each row, all are decoded once, at the start, into an Arrow file without
a name (`scratch`), from which single rows can be read. Owns that choice. Does not know what columns mean.
"""

from __future__ import annotations

import bisect
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollplex.data.files import open_regular
from rollplex.data.stores.arrow import arrow_errors, give_back, import_pyarrow, row_of
from rollplex.data.stores.base import RawRow, Stamp, check_not_empty, check_number, digest_of
from rollplex.data.stores.scratch import Scratch
from rollplex.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

CACHE_BYTES = 64 * 2**20
"""Of decoded row groups kept. Files that declare no more in all (before compression) are never unpacked."""
SMALL_GROUP_BYTES = 8 * 2**20
"""Row groups that declare at most so much are decoded again whenever they are needed."""
MAX_GROUP_BYTES = 2 * 2**30
"""A larger row group is refused: decoding it takes three times its size in memory."""
MAX_DECODED_BYTES = 4 * CACHE_BYTES
"""What a row group that declares less may turn out to have: texts that repeat are stored once."""
DO_REWRITE = "Write it anew with smaller row groups, e.g. pyarrow.parquet.write_table(table, file, row_group_size=100)."


class ParquetRows:
    """The rows of Parquet files, one after the other.

    Args:
        paths: regular files.
        name: what errors call them together.
        binary: False: columns (or parts of them) that hold bytes are left out, and never read.

    Raises:
        DataError: a file that cannot be opened or is not Parquet, a row group that is too large, no rows.
        ConfigError: pyarrow is not installed.
    """

    form = "Parquet"

    def __init__(self, paths: Sequence[Path], name: Path, *, binary: bool = True) -> None:
        self._name = str(name)
        files = [_File(path, binary=binary) for path in paths]
        fds = [file.fd for file in files]
        self._stamp = Stamp(fds, self._name)
        self.digest = digest_of(fds)
        self._files = files
        self._groups = [(file, index) for file in files for index in range(len(file.group_bytes))]
        self._ends: list[int] = []
        for file, index in self._groups:
            self._ends.append((self._ends[-1] if self._ends else 0) + file.group_rows[index])
        check_not_empty(len(self), self._name)
        self._kept: OrderedDict[int, pa.Table] = OrderedDict()
        self._scratch: Scratch | None = None
        sizes = [size for file in files for size in file.group_bytes]
        if sum(sizes) > CACHE_BYTES and max(sizes) > SMALL_GROUP_BYTES:
            self._scratch = Scratch(self._name, sum(sizes))
            self._scratch.fill(batch for file in files for batch in file.batches())
            for file in files:
                file.forget()
            give_back()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def raw(self, number: int) -> RawRow:
        check_number(number, len(self), self._name)
        self._stamp.check()
        if self._scratch is not None:
            return self._scratch.raw(number, self.where(number))
        group = bisect.bisect_right(self._ends, number)
        start = self._ends[group - 1] if group else 0
        return row_of(self._group(group), number - start, self.where(number))

    def where(self, number: int) -> str:
        return f"{self._name} (row {number})"

    def close(self) -> None:
        self._kept.clear()
        if self._scratch is not None:
            self._scratch.close()
        for file in self._files:
            file.close()

    def _group(self, index: int) -> pa.Table:
        """A decoded row group; others are dropped to make room for it."""
        if index not in self._kept:
            file, local = self._groups[index]
            dropped = False
            while self._kept and sum(table.nbytes for table in self._kept.values()) + file.group_bytes[local] > (
                CACHE_BYTES
            ):
                self._kept.popitem(last=False)
                dropped = True
            if dropped:
                give_back()
            self._kept[index] = file.group(local)
        self._kept.move_to_end(index)
        return self._kept[index]


class _File:
    """One Parquet file."""

    def __init__(self, path: Path, *, binary: bool) -> None:
        pa = import_pyarrow("Parquet")
        import pyarrow.parquet as pq  # noqa: PLC0415 - an extra

        self.fd = open_regular(path)
        self._path = path
        try:
            source = pa.PythonFile(os.fdopen(self.fd, "rb", closefd=False), mode="r")
            self._file = pq.ParquetFile(source, pre_buffer=False)  # its buffers would stay for the life of the reader
            metadata = self._file.metadata
            self._columns = None if binary else _without_bytes(self._file)
            groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
            self.group_rows = [group.num_rows for group in groups]
            self.group_bytes = [_declared(group, self._columns) for group in groups]
        except arrow_errors() as error:
            os.close(self.fd)
            raise DataError("This Parquet file cannot be read", got=str(error), where=str(path)) from error
        if max(self.group_bytes, default=0) > MAX_GROUP_BYTES:
            raise DataError(
                "A row group of this Parquet file is too large",
                got=f"{max(self.group_bytes)} bytes",
                needed=f"at most {MAX_GROUP_BYTES}",
                do=DO_REWRITE,
                where=str(path),
            )

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows in order, a few at a time."""
        try:
            yield from self._file.iter_batches(batch_size=4, columns=self._columns, use_threads=False)
        except arrow_errors() as error:
            raise DataError("This Parquet file cannot be read", got=str(error), where=str(self._path)) from error

    def group(self, index: int) -> pa.Table:
        """One decoded row group, its strings no longer shared."""
        pieces: list[Any] = []
        size = 0
        pa = import_pyarrow("Parquet")
        try:
            for batch in self._file.iter_batches(
                batch_size=1024, row_groups=[index], columns=self._columns, use_threads=False
            ):
                pieces.append(batch)
                size += batch.nbytes
                if size > MAX_DECODED_BYTES:
                    raise DataError(
                        "A row group of this Parquet file is larger than it declares",
                        got=f"{self.group_bytes[index]} bytes declared, more than {MAX_DECODED_BYTES} decoded",
                        do=DO_REWRITE,
                        where=str(self._path),
                    )
            return pa.Table.from_batches(pieces, schema=pieces[0].schema)
        except arrow_errors() as error:
            raise DataError("This Parquet file cannot be read", got=str(error), where=str(self._path)) from error

    def forget(self) -> None:
        """No more rows are wanted; lets go of the last row group, which pyarrow's reader keeps."""
        self._file.close()

    def close(self) -> None:
        self.forget()
        os.close(self.fd)


def _declared(group: Any, columns: list[str] | None) -> int:
    """Bytes of a row group before compression, of the columns that are read."""
    chunks = [group.column(index) for index in range(group.num_columns)]
    return sum(c.total_uncompressed_size for c in chunks if columns is None or c.path_in_schema in columns)


def _without_bytes(file: Any) -> list[str]:
    """The paths of the leaves that do not hold bytes."""
    leaves = [file.schema.column(index) for index in range(len(file.schema))]
    return [
        leaf.path
        for leaf in leaves
        if leaf.physical_type not in {"BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"} or leaf.logical_type.type != "NONE"
    ]
