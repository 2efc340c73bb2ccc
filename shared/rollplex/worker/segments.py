"""The segments that this process has mapped.

Owns the descriptors that the coordinator's holder sent, and keeps each open until its lease ends. Does not know what
lies in a segment.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

from rollplex.errors import SegmentError
from rollplex.memory.fds import recv, send
from rollplex.memory.segment import Backend, Mapping
from rollplex.protocol.codec import FROM_HOLDER, MAX_HOLDER_FRAME_BYTES, TO_HOLDER
from rollplex.protocol.common import Memory, SegmentRef
from rollplex.protocol.holder import Descriptor, Fetch, NoSuchSegment
from rollplex.worker.messages import CoordinatorGone

FETCH_DEADLINE_S = 60.0
"""The coordinator may be ending workers that the kernel holds, and starting MPS daemons."""


class Segments:
    """Maps segments by reference, each once; `detach` when the lease ends. Used by one thread only.

    Args:
        stream: to the holder.
        open_backend: gives the backend of a kind of memory (`rollplex.memory.backend`); asked once for each kind, when
            the first segment of it is mapped.
        run_id: of the run that this process belongs to.
        run_dir: of the run.
    """

    def __init__(
        self,
        stream: socket.socket,
        open_backend: Callable[[Memory], Backend],
        run_id: str,
        run_dir: Path | None = None,
    ) -> None:
        self.run_id = run_id
        """What a weights header must say."""
        self.run_dir = run_dir
        """Where this process may make sockets of its own; None where there is no run."""
        self._stream = stream
        self._open_backend = open_backend
        self._backends: dict[Memory, Backend] = {}
        self._fds: dict[int, int] = {}
        self._mapped: dict[int, Mapping] = {}

    def attach(self, ref: SegmentRef) -> Mapping:
        """The mapping of `ref`, fetched from the holder on first use.

        Raises:
            SegmentError: the holder has no such segment, it is not what `ref` says, or it cannot be mapped.
            CoordinatorGone: its stream has ended.
        """
        if ref.segment in self._mapped:
            return self._mapped[ref.segment]
        if ref.memory not in self._backends:
            self._backends[ref.memory] = self._open_backend(ref.memory)
        known = ref.segment in self._fds
        try:
            self._mapped[ref.segment] = self._backends[ref.memory].map(self.descriptor(ref), ref.size_bytes)
        except SegmentError:
            if not known and ref.segment in self._fds:
                os.close(self._fds.pop(ref.segment))
            raise
        return self._mapped[ref.segment]

    def attach_new(self, ref: SegmentRef) -> Mapping:
        """`attach`, for the first writer of a segment and before anybody else looks at it: all its bytes are 0 then,
        also where new memory is not.

        Raises: as `attach`.
        """
        mapping = self.attach(ref)
        if ref.memory is not Memory.HOST:
            mapping.clear()
        return mapping

    def descriptor(self, ref: SegmentRef) -> int:
        """The descriptor of `ref`, fetched on first use, for a process of ours that maps it by itself. It stays open
        until `detach`, and is not the caller's to close.

        Raises: as `attach`.
        """
        if ref.segment not in self._fds:
            self._fds[ref.segment] = self._fetch(ref)
        return self._fds[ref.segment]

    def detach(self, segment: int) -> None:
        """Unmap a segment and close its descriptor; nothing happens if neither is here.

        Raises:
            SegmentError: a tensor over it is still alive; it stays mapped.
        """
        if segment in self._mapped:
            self._mapped[segment].close()
            del self._mapped[segment]
        if segment in self._fds:
            os.close(self._fds.pop(segment))

    @property
    def attached(self) -> dict[int, int]:
        """Segment number to mapped bytes."""
        return {segment: mapping.size_bytes for segment, mapping in self._mapped.items()}

    def _fetch(self, ref: SegmentRef) -> int:
        try:
            send(self._stream, TO_HOLDER.encode(Fetch(segment=ref.segment)), (), FETCH_DEADLINE_S)
            payload, fds = recv(self._stream, FETCH_DEADLINE_S, MAX_HOLDER_FRAME_BYTES, 1)
        except EOFError as error:
            raise CoordinatorGone("the coordinator ended", do="Start the run again.") from error
        try:
            match answer := FROM_HOLDER.decode(payload):
                case Descriptor() if len(fds) == 1 and _same(answer, ref):
                    fd, fds = fds[0], ()
                    return fd
                case NoSuchSegment():
                    got = f"segment {ref.segment}: {answer.why}"
                case _:
                    got = f"{answer} with {len(fds)} descriptors"
        finally:
            for surplus in fds:
                os.close(surplus)
        raise SegmentError(
            "cannot attach a segment", got=got, needed=f"{ref}", do="Its lease has ended or never began."
        )


def _same(answer: Descriptor, ref: SegmentRef) -> bool:
    return (answer.kind, answer.size_bytes, answer.memory) == (ref.kind, ref.size_bytes, ref.memory)
