"""The segments that this process has mapped.

Owns the descriptors that the coordinator's holder sent, and keeps each open until its lease ends. Does not know what
lies in a segment.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from rollplex.errors import SegmentError
from rollplex.memory.fds import recv, send
from rollplex.memory.segment import Backend, Mapping
from rollplex.protocol.codec import FROM_HOLDER, MAX_HOLDER_FRAME_BYTES, TO_HOLDER
from rollplex.protocol.common import SegmentRef
from rollplex.protocol.holder import Descriptor, Fetch, NoSuchSegment
from rollplex.worker.messages import CoordinatorGone

FETCH_DEADLINE_S = 10.0


class Segments:
    """Maps segments by reference, each once; `detach` when the lease ends. Used by one thread only."""

    def __init__(self, stream: socket.socket, backend: Backend, run_id: str, run_dir: Path | None = None) -> None:
        self.run_id = run_id
        """Of the run that this process belongs to: what a weights header must say."""
        self.run_dir = run_dir
        """Where this process may make sockets of its own; None where there is no run."""
        self._stream = stream
        self._backend = backend
        self._mapped: dict[int, tuple[int, Mapping]] = {}
        self._unmapped: dict[int, int] = {}

    def attach(self, ref: SegmentRef) -> Mapping:
        """The mapping of `ref`, fetched from the holder on first use.

        Raises:
            SegmentError: the holder has no such segment, it is not what `ref` says, or it cannot be mapped.
            CoordinatorGone: its stream has ended.
        """
        if ref.segment in self._mapped:
            return self._mapped[ref.segment][1]
        fd = self.descriptor(ref)
        del self._unmapped[ref.segment]
        try:
            mapping = self._backend.map(fd, ref.size_bytes)
        except SegmentError:
            os.close(fd)
            raise
        self._mapped[ref.segment] = (fd, mapping)
        return mapping

    def descriptor(self, ref: SegmentRef) -> int:
        """The descriptor of `ref`, fetched on first use and open until `detach`; nothing is mapped here. For a process
        of this worker's own that maps it instead.

        Raises:
            SegmentError: the holder has no such segment, or it is not what `ref` says.
            CoordinatorGone: its stream has ended.
        """
        if ref.segment in self._mapped:
            return self._mapped[ref.segment][0]
        if ref.segment not in self._unmapped:
            self._unmapped[ref.segment] = self._fetch(ref)
        return self._unmapped[ref.segment]

    def detach(self, segment: int) -> None:
        """Unmap a segment and close its descriptor; nothing happens if neither is here.

        Raises:
            SegmentError: a tensor over it is still alive; it stays mapped.
        """
        if segment in self._mapped:
            fd, mapping = self._mapped[segment]
            mapping.close()
            del self._mapped[segment]
            os.close(fd)
        elif segment in self._unmapped:
            os.close(self._unmapped.pop(segment))

    @property
    def attached(self) -> dict[int, int]:
        """Segment number to mapped bytes."""
        return {segment: mapping.size_bytes for segment, (_, mapping) in self._mapped.items()}

    def _fetch(self, ref: SegmentRef) -> int:
        try:
            send(self._stream, TO_HOLDER.encode(Fetch(segment=ref.segment)), (), FETCH_DEADLINE_S)
            payload, fds = recv(self._stream, FETCH_DEADLINE_S, MAX_HOLDER_FRAME_BYTES, 1)
        except EOFError as error:
            raise CoordinatorGone("the coordinator ended", do="Start the run again.") from error
        try:
            match answer := FROM_HOLDER.decode(payload):
                case Descriptor() if len(fds) == 1 and (answer.kind, answer.size_bytes) == (ref.kind, ref.size_bytes):
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
