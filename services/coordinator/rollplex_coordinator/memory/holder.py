"""The segments' descriptors: made here, kept here, sent to workers on request.

Owns every descriptor for as long as its lease lives, so that a worker's death loses no bytes. Does not decide who may
have how much (ledger) and never maps a segment.
"""

from __future__ import annotations

import os

from msgspec import Struct

from rollplex.errors import SegmentError
from rollplex.memory.segment import Backend
from rollplex.protocol.common import Kind, Memory, SegmentRef


class HeldSegment(Struct, frozen=True, kw_only=True):
    """One segment in the holder's hands."""

    ref: SegmentRef
    lease: int
    fd: int


class Holder:
    """Makes, keeps and closes segments; each belongs to exactly one lease.

    Args:
        host: makes segments of host memory.
        device: of the GPU's; None: there is none.
    """

    def __init__(self, host: Backend, device: Backend | None = None) -> None:
        self._backends = {Memory.HOST: host} if device is None else {Memory.HOST: host, Memory.CUDA: device}
        self._segments: dict[int, HeldSegment] = {}
        self._next = 1

    def device(self, backend: Backend) -> None:
        """From now on segments can lie on a GPU too."""
        self._backends[Memory.CUDA] = backend

    def create(self, kind: Kind, size_bytes: int, lease: int, memory: Memory = Memory.HOST) -> SegmentRef:
        """A new segment of `size_bytes` under `lease`.

        Raises:
            SegmentError: the host or the GPU cannot give the memory.
        """
        fd = self._backends[memory].create(size_bytes, f"rollplex-{kind}-{self._next}")
        ref = SegmentRef(segment=self._next, kind=kind, size_bytes=size_bytes, memory=memory)
        self._segments[ref.segment] = HeldSegment(ref=ref, lease=lease, fd=fd)
        self._next += 1
        return ref

    def find(self, segment: int) -> HeldSegment | None:
        """The held segment of that number, or None."""
        return self._segments.get(segment)

    def close(self, segment: int) -> None:
        """Give a segment's bytes back, as far as this process holds them.

        Raises:
            SegmentError: there is no such segment.
        """
        held = self._segments.pop(segment, None)
        if held is None:
            raise SegmentError(
                "cannot close a segment", got=f"segment {segment}", needed=f"one of {list(self._segments)}"
            )
        os.close(held.fd)

    def close_all(self) -> None:
        """At the end of the run."""
        for segment in list(self._segments):
            self.close(segment)

    def measured(self) -> dict[int, int]:
        """Lease to the bytes that its segments really have: asked of the kernel, or (of a GPU) as they were made."""
        sizes: dict[int, int] = {}
        for held in self._segments.values():
            sizes[held.lease] = sizes.get(held.lease, 0) + self._backends[held.ref.memory].size(held.fd)
        return sizes
