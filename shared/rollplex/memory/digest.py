"""The digest of a segment's parameters, the same for every kind of memory.

Owns: what it is. Does not know: the header, tensors; how a GPU computes it is in `digest_device`.

It is over every byte after the header page, padding and alignment gaps included: they are zero, and a stray store into
them is as wrong as one into a parameter. All numbers are unsigned, of 64 bits, little-endian, and wrap:

    w[i]    the i-th word after the header; the last one filled up with zeros       i = 0 .. n-1
    k[i]    (2 i + 1) * GOLDEN, an odd number
    x[i]    w[i] + k[i], then twice:  x ^= x >> 32;  x *= MIX;  and at last  x ^= x >> 32
    lanes   sum of x[i];  sum of x[i] * k[i]

    digest  BLAKE2b, 32 bytes, over  "rollplex digest 2" | hash of the table | n | both lanes

Sums, so that any number of threads can add in any order. Each x[i] is a bijection of w[i]: one changed word changes
both lanes, always; several changed words leave both as they were with a chance below 2^-64, also where they have
swapped places or numbers have changed their signs. Against somebody who looks for a collision it is no protection.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollplex.errors import SegmentError
from rollplex.layout.parameters import ParameterTable, align
from rollplex.memory.segment import Mapping
from rollplex.protocol.common import Memory

GOLDEN: Final = 0x9E37_79B9_7F4A_7C15
MIX: Final = 0xD6E8_FEB8_6659_FD93
WORD_BYTES: Final = 8
_NAME: Final = b"rollplex digest 2"
_MASK: Final = 2**64 - 1
_CHUNK_WORDS: Final = 2**15
"""All arrays of a chunk fit into a core's own cache."""


def digest(mapping: Mapping, table: ParameterTable, total_bytes: int | None = None) -> str:
    """64 hexadecimal digits. Nothing may be written meanwhile. About 1 GB/s in host memory; torch is imported only for
    memory of a GPU.

    Args:
        mapping: of the segment.
        table: of the whole model, whatever the segment holds of it.
        total_bytes: of the segment, where it is one device's of several (`rollplex.layout.parallel.plan`); the table's
            unless given.

    Raises:
        SegmentError: the segment is smaller than the table.
    """
    total_bytes = table.total_bytes if total_bytes is None else total_bytes
    if mapping.size_bytes < total_bytes:
        raise SegmentError(
            "A segment is smaller than its parameters",
            got=f"{mapping.size_bytes} bytes",
            needed=f"{total_bytes}",
        )
    size_bytes = total_bytes - table.header_bytes
    if mapping.memory is Memory.HOST:
        with mapping.view(table.header_bytes, size_bytes) as content:
            lanes = host_lanes(content)
    else:
        from rollplex.memory.digest_device import mapping_lanes  # noqa: PLC0415 - torch, which hosts do without

        lanes = mapping_lanes(mapping, table.header_bytes, size_bytes)
    return seal(table.hash, -(-size_bytes // WORD_BYTES), lanes)


def seal(table_hash: str, num_words: int, lanes: tuple[int, int]) -> str:
    """The digest from its parts."""
    state = hashlib.blake2b(_NAME + bytes.fromhex(table_hash), digest_size=32)
    state.update(struct.pack("<QQQ", num_words, *lanes))
    return state.hexdigest()


def host_lanes(content: memoryview | bytes) -> tuple[int, int]:
    """Both lanes of some bytes."""
    lanes = [0, 0]
    _add_bytes(lanes, content, 0)
    return lanes[0], lanes[1]


class TableDigest:
    """The digest that a segment with the whole table would have, of entries that are given one after the other."""

    def __init__(self, table: ParameterTable) -> None:
        self._table = table
        self._lanes = [0, 0]
        self._given = 0
        self._words = 0

    def add(self, content: memoryview | bytes) -> None:
        """The bytes of the next entry of the table, in its order. Raises SegmentError if they are not as many."""
        entry = self._table.entries[self._given]
        if len(content) != entry.size_bytes:
            raise SegmentError(
                "An entry has another size", got=f"{len(content)} bytes", needed=f"{entry.size_bytes}", where=entry.name
            )
        end = (entry.offset + align(entry.size_bytes) - self._table.header_bytes) // WORD_BYTES
        whole = len(content) // WORD_BYTES * WORD_BYTES
        _add_bytes(self._lanes, content[:whole], self._words)
        rest = bytes(content[whole:])
        self._words += whole // WORD_BYTES
        _add_bytes(self._lanes, rest.ljust((end - self._words) * WORD_BYTES, b"\0"), self._words)
        self._words = end
        self._given += 1

    def result(self) -> str:
        """64 hexadecimal digits, when all entries are given."""
        if self._given != len(self._table.entries):
            raise AssertionError(f"{self._given} of {len(self._table.entries)} entries")
        return seal(self._table.hash, self._words, (self._lanes[0], self._lanes[1]))


def _add_bytes(lanes: list[int], content: memoryview | bytes, first: int) -> None:
    """first: number of the first word."""
    whole = len(content) // WORD_BYTES * WORD_BYTES
    words = np.frombuffer(content, dtype="<u8", count=whole // WORD_BYTES)
    for start in range(0, len(words), _CHUNK_WORDS):
        _add(lanes, words[start : start + _CHUNK_WORDS], first + start)
    if whole < len(content):
        last = bytes(content[whole:]).ljust(WORD_BYTES, b"\0")
        _add(lanes, np.frombuffer(last, dtype="<u8"), first + len(words))


def first_key(index: int) -> int:
    """k[index]."""
    return (2 * index + 1) * GOLDEN & _MASK


def _add(lanes: list[int], words: NDArray[np.uint64], start: int) -> None:
    keys = np.arange(len(words), dtype=np.uint64)
    keys *= np.uint64(2 * GOLDEN & _MASK)
    keys += np.uint64(first_key(start))
    mixed = words + keys
    half = np.empty_like(mixed)
    for _ in range(2):
        np.right_shift(mixed, np.uint64(32), out=half)
        mixed ^= half
        mixed *= np.uint64(MIX)
    np.right_shift(mixed, np.uint64(32), out=half)
    mixed ^= half
    lanes[0] = (lanes[0] + int(mixed.sum())) & _MASK
    mixed *= keys
    lanes[1] = (lanes[1] + int(mixed.sum())) & _MASK
