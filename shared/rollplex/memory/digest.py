"""The digest of a segment's parameters.

Owns: what it is over. Does not know: the header, tensors.

BLAKE2b, 32 bytes, over the hash of the table and then every byte after the header page, padding and alignment gaps
included: they are zero, and a stray store into them is as wrong as one into a parameter.
"""

from __future__ import annotations

import hashlib
from typing import Final

from rollplex.errors import SegmentError
from rollplex.layout.parameters import ParameterTable
from rollplex.memory.segment import Mapping

_CHUNK_BYTES: Final = 4 * 2**20


def digest(mapping: Mapping, table: ParameterTable) -> str:
    """64 hexadecimal digits. Nothing may be written meanwhile; about 1 GB/s.

    Raises:
        SegmentError: the segment is smaller than the table.
    """
    if mapping.size_bytes < table.total_bytes:
        raise SegmentError(
            "A segment is smaller than its parameters",
            got=f"{mapping.size_bytes} bytes",
            needed=f"{table.total_bytes}",
        )
    state = hashlib.blake2b(bytes.fromhex(table.hash), digest_size=32)
    for offset in range(table.header_bytes, table.total_bytes, _CHUNK_BYTES):
        state.update(mapping.read(offset, min(_CHUNK_BYTES, table.total_bytes - offset)))
    return state.hexdigest()
