"""For TensorBoard: RUN/tensorboard/events.out.tfevents.<time>.<host>.<pid>, one record per row of numbers, text, image.

Owns the file and its format, of which it writes the little that these need: TFRecord's framing with masked CRC-32C,
and protobuf's Event, Summary and Value. By hand, because the packages that write it (tensorboardX, torch's own) import
torch where it is installed, and the coordinator does without. Never fails a run: a disk that refuses is told once.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

FLUSH_PERIOD_S = 2.0
MAX_FLOAT32 = 3.4028234663852886e38
_POLYNOMIAL = 0x82F63B78
_MASK = 0xFFFFFFFF

log = logging.getLogger("rollplex.coordinator")


class TensorBoard:
    """One event file. Belongs to the core's thread.

    Args:
        folder: made if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._flushed_s = time.monotonic()
        try:
            folder.mkdir(exist_ok=True)
            name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
            self._file = (folder / name).open("wb")
        except OSError as error:
            self._give_up(error)
        self._write(_event(time.time(), _text(3, "brain.Event:2")))

    def restart(self, step: int) -> None:
        """From here on the run goes on with `step`: what an earlier file has of this and later steps is void."""
        session_start = b"\x08\x01"
        self._write(_event(time.time(), _number(2, step) + _field(7, session_start)))

    def scalars(self, step: int, values: Mapping[str, object], prefix: str = "") -> None:
        """One record with every number of `values` that is finite, as `prefix` + its name.

        The format holds float32: what is beyond that is left out like what is not finite.
        """
        summary = b"".join(
            _field(1, _text(1, prefix + name) + struct.pack("<Bf", 2 << 3 | 5, value))
            for name, value in values.items()
            if isinstance(value, int | float) and abs(value) <= MAX_FLOAT32
        )
        if summary:
            self._write(_event(time.time(), _number(2, step) + _field(5, summary)))
        self.tick()

    def text(self, step: int, tag: str, markdown: str) -> None:
        """One text: a tensor of one string, for the text plugin."""
        one = _field(2, _number(1, 1))  # a shape of one dimension of size 1
        tensor = _number(1, _DT_STRING) + _field(2, one) + _text(8, markdown)
        self._summary(step, _text(1, tag) + _field(8, tensor) + _TEXT_PLUGIN)

    def image(self, step: int, tag: str, png: bytes, width: int, height: int) -> None:
        """One image: PNG, RGB."""
        image = _number(1, height) + _number(2, width) + _number(3, _RGB) + _field(4, png)
        self._summary(step, _text(1, tag) + _field(4, image))

    def tick(self) -> None:
        """Let readers see what has been buffered for a while."""
        now = time.monotonic()
        if self._file is not None and now - self._flushed_s >= FLUSH_PERIOD_S:
            self._flushed_s = now
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Write what is buffered."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._give_up(error)

    def _summary(self, step: int, value: bytes) -> None:
        """One record with one Value."""
        self._write(_event(time.time(), _number(2, step) + _field(5, _field(1, value))))

    def _write(self, data: bytes) -> None:
        if self._file is not None:
            try:
                self._file.write(_record(data))
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.warning(
            "TensorBoard's file cannot be written, and is left out from here on: %s. Free space in %s, or set "
            "run.tensorboard to false; metrics.jsonl has the same numbers",
            error,
            self._folder,
        )
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as again:
                log.debug("%s", again)  # what it had buffered is what could not be written


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)  # noqa: PLW2901 - eight steps on one value
        table.append(value)
    return tuple(table)


_CRC = _crc_table()


def _masked_crc(data: bytes) -> bytes:
    """TFRecord's checksum of `data`: CRC-32C, rotated and shifted, little endian."""
    table, crc = _CRC, _MASK
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    crc ^= _MASK
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & _MASK)


def _record(data: bytes) -> bytes:
    """length (uint64) ▸ its checksum ▸ data ▸ its checksum."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _masked_crc(length), data, _masked_crc(data)))


def _event(wall_s: float, fields: bytes) -> bytes:
    return struct.pack("<Bd", 1 << 3 | 1, wall_s) + fields


def _text(field: int, text: str) -> bytes:
    return _field(field, text.encode("utf-8", "backslashreplace"))


def _number(field: int, value: int) -> bytes:
    return bytes((field << 3,)) + _varint(value)


def _field(number: int, data: bytes) -> bytes:
    """A length-delimited field of protobuf."""
    return bytes((number << 3 | 2,)) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_DT_STRING = 7
_RGB = 3
_TEXT_PLUGIN = _field(9, _field(1, _text(1, "text")))
"""SummaryMetadata that says whose data it is; the plugin's own part of it is empty (version 0)."""
