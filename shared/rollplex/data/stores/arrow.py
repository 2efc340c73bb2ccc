"""What the formats of Arrow share: the package, its errors, and a row of a table as plain values."""

from __future__ import annotations

from typing import Any

from rollplex.data.stores.base import RawRow, missing_extra
from rollplex.errors import DataError


def import_pyarrow(what: str) -> Any:
    """The package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise missing_extra(what, "pyarrow", "data") from error
    return pa


def arrow_errors() -> tuple[type[Exception], ...]:
    """What pyarrow raises on files that are not what they seem."""
    return (import_pyarrow("Parquet").ArrowException, OSError, ValueError, TypeError, KeyError, NotImplementedError)


def row_of(table: Any, index: int, where: str) -> RawRow:
    """One row of a table or a batch.

    Raises:
        DataError: a value that is not what its type says, such as text that is not UTF-8.
    """
    try:
        row: RawRow = table.slice(index, 1).to_pylist()[0]
    except (UnicodeDecodeError, ValueError, OverflowError) as error:
        raise DataError("A value of this row cannot be read", got=str(error), where=where) from error
    return row


def give_back() -> None:
    """Have Arrow return freed memory to the system."""
    import_pyarrow("Parquet").default_memory_pool().release_unused()
