"""What a segment is, whatever memory it lies in.

Owns: the contract between the holder, the services and a backend, and the choice of backend by name. Does not know: how
a descriptor travels (`fds`), what the bytes mean (`header`, `tensors`), leases.

A segment is one physical allocation of fixed size, known by a file descriptor. It lives as long as any process holds
the descriptor or a mapping of it, whoever made it; a process that is killed takes nothing with it. Descriptors are
trusted only after `verify`: a peer that could shrink a segment could end every process that reads it (SIGBUS).

Two kinds of memory: `host` (memfds) and `cuda` (GPUs, of which a process uses one, and through it what it maps of
others). A new segment of the host is zero. That of a device may hold anything, since whoever makes it has no context to
clear it with: its first writer does, before anybody reads (`Mapping.clear`, `rollplex.worker.Segments.attach_new`).

The seam for another kind: `Backend` and `Mapping` in one module of its own, its name in `backend`, and in
`tensors.tensor` and `digest` the way from its mapping to numbers. All else here and in the tests goes through this
contract.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol, Self

from rollplex.errors import SegmentError
from rollplex.memory.host import HostBackend
from rollplex.protocol.common import Memory


class Mapping(Protocol):
    """A segment in this process's address space, readable and writable. Not thread-safe to close.

    Every access outside [0, size_bytes), and every access after close, raises SegmentError.
    """

    @property
    def memory(self) -> Memory:
        """Where the bytes lie."""
        ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    @property
    def buffer(self) -> memoryview:
        """All of it as writable bytes, without a copy. Host memory only; a device mapping raises SegmentError."""
        ...

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Part of `buffer`, without a copy. As long as it (or what is made from it: array, tensor) is alive, the
        mapping cannot be closed."""
        ...

    def device_view(self, offset: int, size_bytes: int) -> Any:
        """The same for a GPU: an object with `__cuda_array_interface__`, bytes (uint8), and with `address`,
        `size_bytes` and `device`, the GPU that may use them. Device memory only; a host mapping raises SegmentError."""
        ...

    def read(self, offset: int, size_bytes: int) -> bytes:
        """A copy of some bytes."""
        ...

    def write(self, offset: int, content: bytes) -> None:
        """Copy some bytes in. Not atomic."""
        ...

    def load_word(self, offset: int) -> int:
        """The unsigned 64-bit number (native byte order) at an offset that is a multiple of 8, in one load."""
        ...

    def store_word(self, offset: int, value: int) -> None:
        """Like `load_word`, in one store: another process sees the old number or the new one, never a mixture."""
        ...

    def clear(self) -> None:
        """All bytes become 0."""
        ...

    def close(self) -> None:
        """Unmap. Again: nothing happens.

        Raises:
            SegmentError: something still views the bytes. The mapping then stays as it was: whoever gives memory back
                must first drop what looks at it, since afterwards those addresses may mean anything.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Backend(Protocol):
    """One kind of memory."""

    @property
    def name(self) -> str:
        """As the configuration says it."""
        ...

    def create(self, size_bytes: int, name: str) -> int:
        """A new segment, really allocated: zeros (host) or anything (a device). Returns the descriptor, which the
        caller closes. Needs no CUDA context.

        Args:
            size_bytes: exact size, at least 1. It may take more (`rollplex.memory.placement.taken_bytes`).
            name: for people who look at /proc or a profiler; at most 200 bytes.

        Raises:
            SegmentError: the machine cannot give that much, or a limit forbids it. Nothing is left behind.
        """
        ...

    def size(self, fd: int) -> int:
        """Bytes of the segment. Raises SegmentError if `fd` is not open, or is of a device and was not made by this
        backend: then it does not tell."""
        ...

    def verify(self, fd: int) -> None:
        """Raises SegmentError unless nobody can ever change the size of what `fd` names. (Of a device, this refuses
        what is certainly none of its segments; `map` refuses the rest.)"""
        ...

    def map(self, fd: int, size_bytes: int) -> Mapping:
        """Verify, compare the size with `size_bytes`, map. The descriptor stays the caller's; the mapping outlives it.

        Raises:
            SegmentError: not verified, another size, or no address space.
        """
        ...


def backend(name: str, *, uuid: str | None = None) -> Backend:
    """The backend `name`.

    Args:
        name: host or cuda.
        uuid: on which GPU it makes segments, and for which it maps those of any (cuda). None: the first that this
            process sees.

    Raises:
        SegmentError: there is none of that name, or not on this machine.
    """
    match name:
        case "host":
            return HostBackend()
        case "cuda":
            from rollplex.memory.cuda import CudaBackend  # noqa: PLC0415 - a host needs none of it

            return CudaBackend(uuid=uuid)
        case _:
            raise SegmentError("There is no such kind of memory", got=name, needed="host or cuda")
