"""Rows decoded once into a file without a name, from which single ones can be read.

The file lies in the folder for temporary files (TMPDIR), has no name, and is gone when it is closed, however the
process ends. It is read, not mapped, so that the memory of the process stays flat.
"""

from __future__ import annotations

import bisect
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollplex.data.stores.arrow import give_back, import_pyarrow, row_of
from rollplex.data.stores.base import RawRow
from rollplex.errors import DataError

SPARE_BYTES = 2**28
"""Free space that is left alone."""


class Scratch:
    """An Arrow file for the rows of one dataset.

    Args:
        name: of the dataset, for errors.
        size_bytes: about as much as its rows will take.

    Raises:
        DataError: there is not enough space.
    """

    def __init__(self, name: str, size_bytes: int) -> None:
        self._name = name
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        if size_bytes + SPARE_BYTES > free:
            raise DataError(
                "Not enough space for temporary files",
                got=f"{free:,} bytes free in {folder}",
                needed=f"{size_bytes + SPARE_BYTES:,} bytes, to unpack the large row groups of {name}",
                do="Set TMPDIR to a folder on a larger disk, or write the dataset with row groups of at most 64 MiB.",
            )
        self._fd, path = tempfile.mkstemp(prefix="rollplex-", dir=folder)
        Path(path).unlink()
        self._ends: list[int] = []

    def fill(self, batches: Iterable[Any]) -> None:
        """Write all rows.

        Raises:
            DataError: the space ran out.
        """
        pa = import_pyarrow("Parquet")
        writer = None
        try:
            for batch in batches:
                if writer is None:
                    sink = pa.PythonFile(os.fdopen(self._fd, "wb", buffering=0, closefd=False), mode="w")
                    writer = pa.ipc.new_file(sink, batch.schema)
                writer.write_batch(batch)
                self._ends.append((self._ends[-1] if self._ends else 0) + batch.num_rows)
            assert writer is not None, "a dataset without rows needs no scratch file"
            writer.close()
            source = pa.PythonFile(os.fdopen(self._fd, "rb", buffering=0, closefd=False), mode="r")
            self._reader = pa.ipc.open_file(source)
        except pa.ArrowException as error:
            raise DataError(
                "The row groups of this dataset do not go together",
                got=str(error),
                needed="the same columns and types in every file",
                do="Write the files again with one schema.",
                where=self._name,
            ) from error
        except OSError as error:
            raise DataError(
                "The temporary file for large row groups cannot be written",
                got=str(error),
                do="Set TMPDIR to a folder on a larger disk.",
                where=self._name,
            ) from error
        give_back()

    def raw(self, number: int, where: str) -> RawRow:
        """One row. Raises DataError as `row_of`."""
        index = bisect.bisect_right(self._ends, number)
        start = self._ends[index - 1] if index else 0
        return row_of(self._reader.get_batch(index), number - start, where)

    def close(self) -> None:
        os.close(self._fd)
