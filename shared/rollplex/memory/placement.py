"""How many bytes a segment really takes, by the memory that it lies in.

Owns: the granule of device memory. Does not know: which blocks go where, who asks for them.
"""

from __future__ import annotations

from typing import Final

from rollplex.protocol.common import Memory

GRANULE_BYTES: Final = 2 * 2**20
"""Device memory is given in multiples of this. A number of ours, so that a plan needs no GPU to be computed;
`rollplex.memory.cuda` compares it with what the driver says."""


def taken_bytes(size_bytes: int, memory: Memory) -> int:
    """What a segment of `size_bytes` takes: on a device whole granules; of host memory what was asked for."""
    if memory is Memory.HOST:
        return size_bytes
    return -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES
