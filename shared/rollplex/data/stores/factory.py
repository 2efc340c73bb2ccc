"""Which format a dataset has: by its extension, and for `.json` by its first character. Opens it."""

from __future__ import annotations

import os
from pathlib import Path

from rollplex.data.files import open_regular
from rollplex.data.stores.base import RowStore
from rollplex.data.stores.huggingface import INDEX_FILE, STATE_FILE, SavedDataset, is_saved_dataset
from rollplex.data.stores.json_array import JsonArray
from rollplex.data.stores.jsonl import JsonLines
from rollplex.data.stores.parquet import ParquetRows
from rollplex.errors import DataError

FORMS = "a .jsonl, .json or .parquet file, or a folder written by datasets' save_to_disk"


def open_store(path: Path, split: str = "", *, binary: bool = True) -> RowStore:
    """Open a dataset.

    Args:
        path: a file or a folder.
        split: of a folder that has several.
        binary: False: values that are bytes may be left out.

    Raises:
        DataError: not there, of no known format, or unreadable.
        ConfigError: the format needs a package that is not installed.
    """
    if path.is_dir():
        return _open_folder(path, split, binary=binary)
    os.close(open_regular(path))
    if split:
        raise DataError(
            "This dataset has no splits", got=f"split {split!r}", do="Take data.split out.", where=str(path)
        )
    match path.suffix.lower():
        case ".jsonl" | ".ndjson":
            return JsonLines(path)
        case ".json":
            return JsonArray(path) if _starts_with(path, b"[") else JsonLines(path)
        case ".parquet":
            return ParquetRows([path], path, binary=binary)
        case suffix:
            raise DataError(
                "This dataset has no known format", got=suffix or "no extension", needed=FORMS, where=str(path)
            )


def _open_folder(folder: Path, split: str, *, binary: bool) -> RowStore:
    if is_saved_dataset(folder):
        return SavedDataset(folder, split)
    files = sorted(path for place in (folder, folder / "data") for path in place.glob("*.parquet"))
    if not files:
        raise DataError(
            "This folder holds no dataset",
            needed=f"{STATE_FILE} or {INDEX_FILE}, as datasets' save_to_disk writes them, or Parquet files",
            where=str(folder),
        )
    splits = sorted({path.name.partition("-")[0].removesuffix(".parquet") for path in files})
    if split not in splits and (split or len(splits) > 1):
        raise DataError(
            "This dataset has no such split" if split else "This dataset has several splits",
            got=f"split {split!r}" if split else "no data.split",
            needed=f"one of {', '.join(splits)}",
            do="Set data.split.",
            where=str(folder),
        )
    chosen = split or splits[0]
    of_split = [path for path in files if path.name.partition("-")[0].removesuffix(".parquet") == chosen]
    return ParquetRows(of_split, folder, binary=binary)


def _starts_with(path: Path, first: bytes) -> bool:
    """Whether the first character that is not blank is this one."""
    fd = open_regular(path)
    try:
        return os.pread(fd, 4096, 0).lstrip().startswith(first)
    finally:
        os.close(fd)
