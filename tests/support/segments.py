"""A worker's segments in one process: the real `Segments`, with descriptors that the test made."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from rollplex.memory.segment import Mapping, backend
from rollplex.protocol.common import Kind, Memory, SegmentRef
from rollplex.worker import Segments

RUN_ID = "test-run"


class HostSegments(Segments):
    """What a coordinator's holder would send, it takes from `create`. `before_*` are called with what is asked for.

    Args:
        device: where all but inputs lie.
    """

    def __init__(self, device: Memory = Memory.HOST) -> None:
        self._made: dict[int, int] = {}
        self._device = device
        self._makers = {memory: backend(memory) for memory in {Memory.HOST, device}}
        self.before_attach: Callable[[SegmentRef], None] = lambda _: None
        self.before_detach: Callable[[int], None] = lambda _: None
        unused = socket.socket()
        unused.close()
        super().__init__(unused, self._makers.__getitem__, RUN_ID)

    def create(self, kind: Kind, size_bytes: int) -> SegmentRef:
        """A new segment."""
        number = len(self._made) + 1
        memory = Memory.HOST if kind is Kind.INPUTS else self._device
        self._made[number] = self._makers[memory].create(size_bytes, f"test-{kind}")
        return SegmentRef(segment=number, kind=kind, size_bytes=size_bytes, memory=memory)

    def attach(self, ref: SegmentRef) -> Mapping:
        self.before_attach(ref)
        return super().attach(ref)

    def detach(self, segment: int) -> None:
        self.before_detach(segment)
        super().detach(segment)

    def map_again(self, ref: SegmentRef) -> Mapping:
        """A second mapping of the same memory, as another process has it."""
        return self._makers[ref.memory].map(self._made[ref.segment], ref.size_bytes)

    def close(self) -> None:
        """Close every descriptor; mappings end with what looks at them."""
        for fd in (*self._made.values(), *self._fds.values()):
            os.close(fd)
        self._made.clear()
        self._fds.clear()
        self._mapped.clear()

    def _fetch(self, ref: SegmentRef) -> int:
        return os.dup(self._made[ref.segment])
