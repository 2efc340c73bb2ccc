"""The folder of a bench: rows on disk as soon as they are measured, and what they were measured with.

    DIR/bench.json     what all rows have in common (`Made`); written first
    DIR/rows.jsonl     one row a line; each is on disk before the next one is started
    DIR/runs, DIR/logs each row's run directory, and what its coordinator said
    DIR/result.json    once every row is there

One bench at a time has it. Knows neither how a row is measured nor what rows mean.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from msgspec import Struct

from rollplex.bench.machine import Machine, Software
from rollplex.bench.rows import Mode, Row
from rollplex.errors import ConfigError, DataError
from rollplex.whole_file import write_whole

MOST_SHOWN = 6
_ROW = msgspec.json.Decoder(Row)


class Made(Struct, frozen=True, kw_only=True):
    """What all rows of a bench have in common."""

    machine: Machine
    software: Software
    config: dict[str, object]
    """Of the first mode; every key."""
    data: str
    """Fingerprint of the rows and images."""
    model: str
    """Fingerprint of config.json, and of names and sizes of the weight files."""
    iterations: int
    warmup: int


class BenchFolder:
    """An open bench folder, locked until `close`.

    Args:
        path: made if it is not there.
        made: of the rows to come.

    Raises:
        ConfigError: rows made with something else, another bench that has it, or files that are not a bench's.
        DataError: a row that cannot be read.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, made: Made) -> None:
        self.path = path
        self.rows: list[Row] = []
        path.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path / "rows.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._lock()
            self._compare(made)
            self.rows = self._read()
        except BaseException:
            os.close(self._file)
            raise

    def run_dir(self, mode: Mode, repeat: int) -> Path:
        """Where a row's node leaves its files; a short path, because it holds sockets."""
        return run_dir_of(self.path, mode, repeat)

    def log(self, mode: Mode, repeat: int) -> Path:
        """Where a row's coordinator says what it does."""
        return self.path / "logs" / f"{_name(mode, repeat)}.log"

    def row(self, mode: Mode, repeat: int) -> Row | None:
        """The row, if it has been measured."""
        return next((row for row in self.rows if (row.mode, row.repeat) == (mode, repeat)), None)

    def append(self, row: Row) -> None:
        """Keep a row; it is on disk when this returns."""
        os.write(self._file, msgspec.json.encode(row) + b"\n")
        os.fsync(self._file)
        self.rows.append(row)

    def close(self) -> None:
        """Let others have it."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "Another bench is running in this folder",
                do="Wait for it, or choose another --out.",
                where=str(self.path),
            ) from None

    def _compare(self, made: Made) -> None:
        """Refuse rows of another bench; write what is common if there is none yet."""
        file = self.path / "bench.json"
        if file.exists():
            try:
                there = msgspec.json.decode(file.read_bytes(), type=Made)
            except msgspec.DecodeError as error:
                raise ConfigError("This file is not a bench's", got=str(error), where=str(file)) from None
            if different := differences(there, made):
                raise ConfigError(
                    "The rows in this folder were made with something else",
                    got="; ".join(different[:MOST_SHOWN]) + ("; …" if len(different) > MOST_SHOWN else ""),
                    needed="the same, so that rows can be compared",
                    do="Choose another --out.",
                    where=str(self.path),
                )
        elif os.fstat(self._file).st_size:
            raise ConfigError(
                "There are rows in this folder, but not what they were made with",
                needed="bench.json",
                where=str(self.path),
            )
        else:
            write_whole(file, msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n", durable=True)

    def _read(self) -> list[Row]:
        """The rows; one that was cut short when the machine stopped is taken off."""
        data = os.pread(self._file, os.fstat(self._file).st_size, 0)
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._file, whole)
        rows = []
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            try:
                rows.append(_ROW.decode(line))
            except msgspec.DecodeError as error:
                where = f"{self.path / 'rows.jsonl'}:{number}"
                raise DataError("A row cannot be read", got=str(error), do="Take the line out.", where=where) from None
        return rows


def run_dir_of(folder: Path, mode: Mode, repeat: int) -> Path:
    """Where a row's node leaves its files."""
    return folder / "runs" / _name(mode, repeat)


def differences(there: Made, now: Made) -> list[str]:
    """What differs, one "key: value there, value now" each."""
    left, right = _flat(msgspec.to_builtins(there)), _flat(msgspec.to_builtins(now))
    keys = [*left, *(key for key in right if key not in left)]
    return [
        f"{key}: {left.get(key)!r} there, {right.get(key)!r} now" for key in keys if left.get(key) != right.get(key)
    ]


def _name(mode: Mode, repeat: int) -> str:
    """Short: paths of sockets are limited."""
    return f"{repeat + 1}-{mode.schedule}-{'repl' if mode.prefix == 'replicated' else mode.prefix}"


def _flat(value: object, path: str = "") -> dict[str, object]:
    if not isinstance(value, Mapping):
        return {path: value}
    return {
        key: item for name, inner in value.items() for key, item in _flat(inner, f"{path}.{name}".lstrip(".")).items()
    }
