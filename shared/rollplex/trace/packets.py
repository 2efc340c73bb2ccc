"""A trace file read back, packet by packet.

Owns the framing. Any file of Perfetto's protobuf format will do, not only ours.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rollplex.errors import RollplexError

_PACKET_TAG = b"\x0a"
_MAX_VARINT_BYTES = 10


class TraceError(RollplexError):
    """A trace file that cannot be read."""


def packets(path: Path) -> Iterator[Any]:
    """Every `TracePacket` of a file, in its order.

    Raises:
        TraceError: the file is not a sequence of packets, or ends in the middle of one.
    """
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2  # noqa: PLC0415 - only readers of traces need it

    kind: Any = perfetto_trace_pb2.TracePacket
    decode_error: type[Exception] = importlib.import_module("google.protobuf.message").DecodeError
    with path.open("rb") as file:
        while tag := file.read(1):
            at = file.tell() - 1
            if tag != _PACKET_TAG:
                raise _broken(path, at, f"the byte {tag.hex()}", "the start of a packet (0a)")
            size = _varint(path, file)
            body = file.read(size)
            if len(body) < size:
                raise _broken(path, at, f"{len(body)} bytes of a packet", f"{size}")
            try:
                yield kind.FromString(body)
            except decode_error as error:
                raise _broken(path, at, str(error), "a TracePacket") from error


def _varint(path: Path, file: IO[bytes]) -> int:
    number = 0
    for place in range(_MAX_VARINT_BYTES):
        byte = file.read(1)
        if not byte:
            break
        number |= (byte[0] & 0x7F) << 7 * place
        if byte[0] < 0x80:
            return number
    raise _broken(path, file.tell(), "no length", "the length of a packet")


def _broken(path: Path, at: int, got: str, needed: str) -> TraceError:
    return TraceError("this is no whole Perfetto trace", got=f"{got} at byte {at}", needed=needed, where=str(path))
