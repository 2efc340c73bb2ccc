"""The segments' descriptors: made here, kept here, sent to workers on request.

Owns every descriptor for as long as its lease lives, so that a worker's death loses no bytes. Does not decide who may
have how much (ledger) and never maps a segment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from msgspec import Struct

from rollplex.errors import SegmentError
from rollplex.memory.segment import Backend
from rollplex.protocol.common import Device, Kind, Memory, SegmentRef
from rollplex_coordinator.decisions.fleet import DEVICE


class HeldSegment(Struct, frozen=True, kw_only=True):
    """One segment in the holder's hands. device: of whose memory it is, or, in host memory, of whose process."""

    ref: SegmentRef
    lease: int
    fd: int
    device: Device


class Holder:
    """Makes, keeps and closes segments; each belongs to exactly one lease.

    Args:
        host: makes segments of host memory.
        gpus: of the memory of each device's GPU; empty: there is none.
    """

    def __init__(self, host: Backend, gpus: Mapping[Device, Backend] | None = None) -> None:
        self._host = host
        self._gpus = dict(gpus or {})
        self._segments: dict[int, HeldSegment] = {}
        self._next = 1

    def gpu(self, device: Device, backend: Backend) -> None:
        """From now on segments can lie on the GPU of a device too."""
        self._gpus[device] = backend

    def create(
        self, kind: Kind, size_bytes: int, lease: int, memory: Memory = Memory.HOST, device: Device = DEVICE
    ) -> SegmentRef:
        """A new segment of `size_bytes` under `lease`.

        Args:
            device: on whose GPU it lies, if its memory is a GPU's.

        Raises:
            SegmentError: the host or the GPU cannot give the memory.
        """
        fd = self._backend(memory, device).create(size_bytes, f"rollplex-{kind}-{self._next}")
        ref = SegmentRef(segment=self._next, kind=kind, size_bytes=size_bytes, memory=memory)
        self._segments[ref.segment] = HeldSegment(ref=ref, lease=lease, fd=fd, device=device)
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
            sizes[held.lease] = sizes.get(held.lease, 0) + self._backend(held.ref.memory, held.device).size(held.fd)
        return sizes

    def _backend(self, memory: Memory, device: Device) -> Backend:
        return self._host if memory is Memory.HOST else self._gpus[device]
