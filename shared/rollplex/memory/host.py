"""Segments in host memory: sealed memfds.

Owns: making, checking and mapping them. Does not know: who holds or sends descriptors, what the bytes mean.

A memfd belongs to no directory, so nothing is left in /dev/shm after a crash. Sealed SHRINK | GROW | SEAL: the size is
fixed for good, and a mapping can never meet a page that is not there; not sealed against writing, so that the
replacement of a dead writer can map it again. `posix_fallocate` takes the pages at once: where memory is short,
`create` fails instead of a later store (SIGBUS).
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
from types import TracebackType
from typing import Final, NoReturn, Self

from rollplex.errors import SegmentError
from rollplex.memory.available import Headroom
from rollplex.memory.checks import check_access, check_request
from rollplex.protocol.common import Memory

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_WRITE_SEALS: Final = {fcntl.F_SEAL_WRITE: "WRITE", 0x0010: "FUTURE_WRITE"}


class HostMapping:
    """A memfd in this process's address space (`rollplex.memory.segment.Mapping`)."""

    memory = Memory.HOST

    def __init__(self, pages: mmap.mmap, size_bytes: int) -> None:
        self._pages = pages
        self._size_bytes = size_bytes

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def closed(self) -> bool:
        return self._pages.closed

    @property
    def buffer(self) -> memoryview:
        return self.view(0, self._size_bytes)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        # A new memoryview of the pages each time: the pages count them, and close() asks that count. One that we kept
        # and released ourselves would be released under the feet of a tensor, which holds the object, not the bytes.
        self._check(offset, size_bytes)
        with memoryview(self._pages) as whole:
            return whole[offset : offset + size_bytes]

    def device_view(self, offset: int, size_bytes: int) -> NoReturn:
        self._check(offset, size_bytes)
        raise SegmentError(
            "Host memory has no bytes that a GPU can look at", got="a device_view of a memfd", needed="view"
        )

    def read(self, offset: int, size_bytes: int) -> bytes:
        with self.view(offset, size_bytes) as part:
            return bytes(part)

    def write(self, offset: int, content: bytes) -> None:
        with self.view(offset, len(content)) as part:
            part[:] = content

    def load_word(self, offset: int) -> int:
        # An item of a memoryview cast to "Q" is fetched and stored with one 8-byte move (CPython: unpack_single).
        self._check(offset, 8, multiple=8)
        with self.view(offset, 8) as part, part.cast("Q") as words:
            return words[0]

    def store_word(self, offset: int, value: int) -> None:
        self._check(offset, 8, multiple=8)
        with self.view(offset, 8) as part, part.cast("Q") as words:
            words[0] = value

    def clear(self) -> None:
        self._check(0, self._size_bytes)
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(self._pages)), 0, self._size_bytes)

    def close(self) -> None:
        try:
            self._pages.close()
        except BufferError:
            gc.collect()  # what only a reference cycle keeps alive is nobody's
            try:
                self._pages.close()
            except BufferError as error:
                raise SegmentError(
                    "A segment cannot be unmapped while something looks at it",
                    got="arrays, tensors or memoryviews of it are alive",
                    needed="none",
                    do="Drop them before close().",
                ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, offset: int, size_bytes: int, multiple: int = 1) -> None:
        check_access(self.closed, self._size_bytes, offset, size_bytes, multiple)


class HostBackend:
    """Sealed memfds (`rollplex.memory.segment.Backend`)."""

    name = "host"

    def __init__(self, headroom: Headroom | None = None) -> None:
        self._headroom = headroom or Headroom()

    def create(self, size_bytes: int, name: str) -> int:
        check_request(size_bytes, name)
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise _not_made(size_bytes, name, error) from error
        try:
            self._check_available(size_bytes, name)
            os.posix_fallocate(fd, 0, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise _not_made(size_bytes, name, error) from error
            raise
        return fd

    def _check_available(self, size_bytes: int, name: str) -> None:
        """Asked before the kernel is, whose answer might be the OOM killer."""
        available = self._headroom.left(size_bytes)
        if size_bytes > available:
            raise SegmentError(
                "The machine has too little memory for a segment",
                got=f"{size_bytes} bytes asked for ({name})",
                needed=f"at most the {available} bytes that are available",
                do="Lower the memory budget, or free memory on this machine.",
            )

    def size(self, fd: int) -> int:
        try:
            return os.fstat(fd).st_size
        except OSError as error:
            raise SegmentError("A descriptor is not open", got=f"fd {fd}: {error.strerror}") from error

    def verify(self, fd: int) -> None:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise SegmentError(
                "A descriptor is not a segment of host memory",
                got=f"fd {fd}: {error.strerror}",
                needed="a memfd with the seals SHRINK, GROW and SEAL",
            ) from error
        names = {fcntl.F_SEAL_SHRINK: "SHRINK", fcntl.F_SEAL_GROW: "GROW", fcntl.F_SEAL_SEAL: "SEAL"}
        has = [text for bit, text in {**names, **_WRITE_SEALS}.items() if seals & bit]
        if seals & SEALS != SEALS or any(seals & bit for bit in _WRITE_SEALS):
            raise SegmentError(
                "A descriptor does not have the seals of a segment",
                got=" | ".join(has) or "none",
                needed="SHRINK | GROW | SEAL and no seal against writing",
            )

    def map(self, fd: int, size_bytes: int) -> HostMapping:
        self.verify(fd)
        size = self.size(fd)
        if size != size_bytes or size < 1:
            raise SegmentError("A segment has another size than agreed", got=f"{size} bytes", needed=f"{size_bytes}")
        try:
            pages = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise SegmentError(
                "A segment cannot be mapped",
                got=str(error.strerror),
                needed=f"{size_bytes} bytes of address space",
                do="Look at the limits of the process (ulimit -v).",
            ) from error
        return HostMapping(pages, size_bytes)


def _not_made(size_bytes: int, name: str, error: OSError) -> SegmentError:
    return SegmentError(
        "A segment could not be made",
        got=f"{error.strerror} for {size_bytes} bytes ({name})",
        needed="memory and limits (ulimit -n, ulimit -f, the memory cgroup) that allow it",
        do="Raise the limit, or lower the memory budget.",
    )
