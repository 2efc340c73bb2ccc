"""Segments in the memory of GPUs: CUDA's virtual memory management, shared by descriptors.

Owns: making and mapping them, and that each import is released once. Does not know: who holds or sends descriptors,
what the bytes mean, torch.

    create      cuMemCreate ▸ export ▸ release           no CUDA context; the descriptor alone keeps the memory
    map         import ▸ reserve ▸ map ▸ allow ▸ release  the mapping alone keeps the memory in this process
    close       wait for the GPU ▸ unmap ▸ free

A backend is of one GPU: it makes segments there, and gives that GPU access to what it maps, which may lie on another
one of the host. The other needs no context in this process for it, and this process need not see it.

A descriptor of device memory has no size that a process could ask for, but the driver knows it, and maps what was
imported as a whole or not at all.

New memory is not promised to be zero, and whoever makes a segment here cannot make it so without a context: its first
writer does (`Mapping.clear`).
"""

from __future__ import annotations

import gc
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self

from rollplex.errors import SegmentError
from rollplex.memory.checks import check_access, check_request
from rollplex.memory.cuda_driver import CudaError, Driver, Live
from rollplex.memory.placement import GRANULE_BYTES, taken_bytes
from rollplex.protocol.common import Memory

_OTHER_SIZE: Final = frozenset({"CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_VALUE"})
"""What drivers answer when an imported allocation is mapped in another size than its own, smaller or larger (580.159:
the first)."""
_UNREACHABLE: Final = frozenset(
    {
        "CUDA_ERROR_INVALID_DEVICE",
        "CUDA_ERROR_INVALID_VALUE",
        "CUDA_ERROR_NOT_SUPPORTED",
        "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
    }
)
"""What drivers may answer when a GPU is to have access to memory that no link leads to."""


class DeviceView:
    """Some bytes of a mapping, as numbers. As long as a library keeps this object (a tensor does), the mapping cannot
    be closed. `device`: the number of the GPU that has access, as this process counts, which need not be where the
    bytes lie; `__cuda_array_interface__` cannot say it."""

    def __init__(self, address: int, size_bytes: int, device: int) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.device = device
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }


class CudaMapping:
    """Device memory in this process's address space (`rollplex.memory.segment.Mapping`).

    Reads and writes through this object first wait for everything that this process has given to the GPU, whatever the
    stream, and are over when they return. What another process gave to the GPU they cannot wait for: its messages say
    when that is done. Not while a CUDA graph is captured.
    """

    memory = Memory.CUDA

    def __init__(self, driver: Driver, device: int, address: int, size_bytes: int) -> None:
        self._driver = driver
        self._device = device
        self._address = address
        self._size_bytes = size_bytes
        self._closed = False
        self._views: weakref.WeakSet[DeviceView] = weakref.WeakSet()

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def buffer(self) -> memoryview:
        return self.view(0, self._size_bytes)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        self._check(offset, size_bytes)
        raise SegmentError(
            "Device memory has no bytes that this process's processor can look at",
            got="a view of a segment in the memory of a GPU",
            needed="device_view, or a copy by read",
        )

    def device_view(self, offset: int, size_bytes: int) -> DeviceView:
        self._check(offset, size_bytes)
        view = DeviceView(self._address + offset, size_bytes, self._device)
        self._views.add(view)
        return view

    def read(self, offset: int, size_bytes: int) -> bytes:
        self._check(offset, size_bytes)
        if not size_bytes:
            return b""
        with self._quiet():
            return self._driver.to_host(self._address + offset, size_bytes)

    def write(self, offset: int, content: bytes) -> None:
        self._check(offset, len(content))
        if content:
            with self._quiet():
                self._driver.to_device(self._address + offset, content)
                self._driver.synchronize()

    def load_word(self, offset: int) -> int:
        # One aligned copy of 8 bytes, which GPUs do at once; CUDA does not promise it, and nothing of ours rests on it:
        # readers of device memory look at a word only after the message that follows its store.
        self._check(offset, 8, multiple=8)
        return int.from_bytes(self.read(offset, 8), "little")

    def store_word(self, offset: int, value: int) -> None:
        self._check(offset, 8, multiple=8)
        self.write(offset, value.to_bytes(8, "little"))

    def clear(self) -> None:
        self._check(0, self._size_bytes)
        with self._quiet():
            self._driver.zero(self._address, self._size_bytes)
            self._driver.synchronize()

    def close(self) -> None:
        if self._closed:
            return
        if self._views:
            gc.collect()  # what only a reference cycle keeps alive is nobody's
        if self._views:
            raise SegmentError(
                "A segment cannot be unmapped while something looks at it",
                got=f"{len(self._views)} arrays or tensors of it are alive",
                needed="none",
                do="Drop them before close().",
            )
        size_bytes = taken_bytes(self._size_bytes, Memory.CUDA)
        with self._quiet():  # kernels that were given tensors which are gone by now
            self._driver.unmap(self._address, size_bytes)
        self._closed = True
        self._driver.free(self._address, size_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, offset: int, size_bytes: int, multiple: int = 1) -> None:
        check_access(self._closed, self._size_bytes, offset, size_bytes, multiple)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """With the GPU's context, and all that this process gave it done."""
        with self._driver.using(self._device):
            self._driver.synchronize()
            yield


class CudaBackend:
    """Memory of one GPU, and for it what lies on others (`rollplex.memory.segment.Backend`).

    Args:
        uuid: of the GPU, as nvidia-smi writes it. A number is no name: each process may count its GPUs in its own way.
        ordinal: of the GPU as this process counts, where no UUID is known: 0 in a process that sees one only.
        driver: for tests.

    Raises:
        SegmentError: no driver, or no such GPU.
    """

    name = "cuda"

    def __init__(self, *, uuid: str | None = None, ordinal: int = 0, driver: Driver | None = None) -> None:
        self._driver = process_driver() if driver is None else driver
        self._device = self._driver.device(uuid, ordinal)
        self._made: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Of the descriptors made here: the size, and what else the kernel tells of the descriptor."""

    def create(self, size_bytes: int, name: str) -> int:
        check_request(size_bytes, name)
        granule = self._driver.granularity(self._device)
        if GRANULE_BYTES % granule:
            raise SegmentError(
                "This GPU gives memory in other portions than Rollplex counts in",
                got=f"{granule} bytes",
                needed=f"a part of {GRANULE_BYTES}",
            )
        try:
            handle = self._driver.create(self._device, taken_bytes(size_bytes, Memory.CUDA))
        except CudaError as error:
            raise SegmentError(
                "A segment could not be made",
                got=f"{error.code} for {size_bytes} bytes ({name})",
                needed="so much free memory on the GPU",
                do=error.do or "Lower memory.budget, or end what else runs on the GPU.",
            ) from error
        try:
            fd = self._driver.export(handle)
        finally:
            self._driver.release(handle)
        try:
            os.set_inheritable(fd, False)
            self._made[fd] = (size_bytes, _identity(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def size(self, fd: int) -> int:
        size_bytes = self._known_size(fd)
        if size_bytes is None:
            raise SegmentError(
                "A descriptor of device memory does not tell its size",
                got=f"fd {fd}, made by another process",
                needed="the size that came with it (SegmentRef.size_bytes)",
            )
        return size_bytes

    def verify(self, fd: int) -> None:
        # The size of device memory is fixed by what it is. Whether this is device memory only the driver can tell, when
        # it is imported; what is certainly none is kept from it.
        kind = stat.S_IFMT(_identity(fd)[0])
        known = {stat.S_IFREG: "a file", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
        if kind in known:
            raise SegmentError(
                "A descriptor is not a segment of device memory",
                got=f"fd {fd}: {known[kind]}",
                needed="a descriptor that the CUDA driver exported",
            )

    def map(self, fd: int, size_bytes: int) -> CudaMapping:
        self.verify(fd)
        known = self._known_size(fd)
        if size_bytes < 1 or known not in {None, size_bytes}:
            got = "a descriptor that does not tell" if known is None else f"{known} bytes"
            raise SegmentError("A segment has another size than agreed", got=got, needed=f"{size_bytes}")
        with self._driver.using(self._device):
            try:
                handle = self._driver.import_fd(fd)
            except CudaError as error:
                raise SegmentError(
                    "A descriptor cannot be imported as device memory",
                    got=f"{error.code} for fd {fd}",
                    needed="a segment that was made on this GPU, or on one that it reaches",
                    do=error.do,
                ) from error
            try:
                address = self._lay(handle, size_bytes)
            finally:
                self._driver.release(handle)
        return CudaMapping(self._driver, self._device, address, size_bytes)

    def live(self) -> Live:
        """What this process holds of the driver, this backend's and others'."""
        return self._driver.live

    def _lay(self, handle: Any, size_bytes: int) -> int:
        """Map a whole allocation: its address. What fails is undone."""
        driver, taken = self._driver, taken_bytes(size_bytes, Memory.CUDA)
        address = driver.reserve(taken)
        try:
            try:
                driver.map(address, taken, handle)
            except CudaError as error:
                if error.code not in _OTHER_SIZE:
                    raise
                raise _another_size(f"an allocation that cannot be mapped as {taken} bytes", size_bytes) from error
            try:
                self._allow(address, taken)
            except BaseException:
                driver.unmap(address, taken)
                raise
        except BaseException:
            driver.free(address, taken)
            raise
        return address

    def _allow(self, address: int, taken: int) -> None:
        """Give the GPU access to what is mapped, wherever it lies."""
        try:
            self._driver.allow(address, taken, self._device)
        except CudaError as error:
            if error.code not in _UNREACHABLE:
                raise
            raise SegmentError(
                "A segment cannot be reached from this GPU",
                got=f"{error.code} for {self._driver.uuid(self._device)}",
                needed="memory of its own, or of a GPU that it has peer access to",
                do="Use GPUs that a link joins (nvidia-smi topo -p2p rw says OK), or parallel.devices: 1.",
            ) from error

    def _known_size(self, fd: int) -> int | None:
        """Of a descriptor made here. The number may name something else by now: then nothing is known of it."""
        made = self._made.get(fd)
        now = _identity(fd)
        if made is not None and made[1] != now:
            del self._made[fd]
            return None
        return None if made is None else made[0]


_drivers: list[Driver] = []


def process_driver() -> Driver:
    """The one driver of this process: a context is kept once, and what is held is counted in one place.

    Raises:
        SegmentError: there is no driver.
    """
    if not _drivers:
        _drivers.append(Driver())
    return _drivers[0]


def _identity(fd: int) -> tuple[int, ...]:
    try:
        found = os.fstat(fd)
    except OSError as error:
        raise SegmentError("A descriptor is not open", got=f"fd {fd}: {error.strerror}") from error
    return found.st_mode, found.st_dev, found.st_ino, found.st_rdev


def _another_size(got: str, needed: int) -> SegmentError:
    return SegmentError("A segment has another size than agreed", got=got, needed=f"{needed} bytes")
