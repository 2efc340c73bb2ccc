"""Folders that `datasets` wrote with `save_to_disk`, read by `datasets` itself (extra `data`).

Only `load_from_disk` is used, on files inside the folder: nothing is downloaded, no code of the folder is run, no image
is decoded. The files are mapped; so that the memory of the process stays flat, the mapping is made anew each time that
much of it has been read.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from rollplex.data.files import open_beneath
from rollplex.data.stores.arrow import arrow_errors, row_of
from rollplex.data.stores.base import RawRow, Stamp, check_not_empty, check_number, digest_of, missing_extra
from rollplex.errors import DataError

INDEX_FILE = "dataset_dict.json"
STATE_FILE = "state.json"
REMAP_BYTES = 64 * 2**20
"""After rows of so many bytes the mapping is made anew."""


class SavedDataset:
    """The rows of one split.

    Args:
        folder: as `save_to_disk` wrote it: of one dataset, or of several splits.
        split: which, if it has several.

    Raises:
        DataError: not such a folder, files that lead out of it, a split that is not there, no rows.
        ConfigError: `datasets` is not installed.
    """

    form = "dataset folder"

    def __init__(self, folder: Path, split: str) -> None:
        self._folder = _of_split(folder.resolve(), split)
        self._name = str(folder)
        fds = [open_beneath(self._folder, name) for name in _data_files(self._folder)]
        self._fds = fds
        self._stamp = Stamp(fds, self._name)
        self.digest = digest_of(fds)
        self._rows = self._load()
        self._num_rows = len(self._rows)
        check_not_empty(self._num_rows, self._name)
        self._row_bytes = max(1, sum(os.fstat(fd).st_size for fd in fds) // self._num_rows)
        self._read_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def raw(self, number: int) -> RawRow:
        check_number(number, len(self), self._name)
        self._stamp.check()
        if self._read_rows * self._row_bytes > REMAP_BYTES:
            del self._rows
            self._rows, self._read_rows = self._load(), 0
        self._read_rows += 1
        return row_of(self._rows[number : number + 1], 0, self.where(number))

    def where(self, number: int) -> str:
        return f"{self._name} (row {number})"

    def close(self) -> None:
        del self._rows
        for fd in self._fds:
            os.close(fd)

    def _load(self) -> Any:
        datasets = _import_datasets()
        try:
            loaded = datasets.Dataset.load_from_disk(str(self._folder), keep_in_memory=False)
        except arrow_errors() as error:
            raise DataError("This dataset folder cannot be read", got=str(error), where=self._name) from error
        return loaded.with_format("arrow")


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` seems to have written this folder."""
    return (folder / INDEX_FILE).is_file() or (folder / STATE_FILE).is_file()


def _import_datasets() -> Any:
    """The package, told to stay off the network before and after it is imported."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"})
    try:
        import datasets  # noqa: PLC0415 - an extra, and slow to import
    except ModuleNotFoundError as error:
        raise missing_extra("A dataset folder", "datasets", "data") from error
    package: Any = datasets
    package.config.HF_HUB_OFFLINE = True
    sys.modules["huggingface_hub"].constants.HF_HUB_OFFLINE = True
    package.disable_progress_bars()
    return package


def _of_split(folder: Path, split: str) -> Path:
    """The folder of one dataset."""
    if not (folder / INDEX_FILE).is_file():
        if split:
            raise DataError(
                "This dataset has no splits", got=f"split {split!r}", do="Take data.split out.", where=str(folder)
            )
        return folder
    names = _json(folder, INDEX_FILE).get("splits")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError("This dataset folder does not name its splits", where=str(folder / INDEX_FILE))
    if split not in names:
        raise DataError(
            "This dataset has several splits" if not split else "This dataset has no such split",
            got=f"split {split!r}" if split else "no data.split",
            needed=f"one of {', '.join(names)}",
            do="Set data.split.",
            where=str(folder),
        )
    return folder / split


def _data_files(folder: Path) -> list[str]:
    """Names of the files with the rows, as the folder itself says."""
    files = _json(folder, STATE_FILE).get("_data_files")
    names = [item.get("filename") for item in files if isinstance(item, dict)] if isinstance(files, list) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise DataError("This dataset folder does not name its files", where=str(folder / STATE_FILE))
    return [str(name) for name in names]


def _json(folder: Path, name: str) -> dict[str, Any]:
    fd = open_beneath(folder, name)
    with os.fdopen(fd, "rb") as file:
        try:
            value = json.load(file)
        except (ValueError, RecursionError) as error:
            raise DataError("This file is not JSON", got=str(error), where=str(folder / name)) from error
    return value if isinstance(value, dict) else {}
