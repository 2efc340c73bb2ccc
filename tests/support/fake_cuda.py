"""What `rollplex.memory.cuda_driver` needs of cuda.bindings.driver, without a GPU.

Allocations are arrays of this process, descriptors are eventfds that hold an allocation's number: like the driver's
they are no files, tell no size, and can be sent. Every call is recorded; any can be made to fail.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, TypeAlias

GRANULE = 2 * 2**20
UUIDS = ("GPU-00112233-4455-6677-8899-aabbccddeeff", "GPU-11112233-4455-6677-8899-aabbccddeeff")


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_SUPPORTED = 801


Result: TypeAlias = tuple[Any, ...]
OK = (CUresult.CUDA_SUCCESS,)
INVALID = (CUresult.CUDA_ERROR_INVALID_VALUE, 0)


@dataclass
class Range:
    """A reserved range of addresses."""

    size: int
    content: bytearray | None = None
    mapped: int = 0
    allowed: bool = False
    lies_on: int = 0


@dataclass
class FakeCuda:
    """One process's driver. `failing`: the calls that fail, with what."""

    total_bytes: int = 2**40
    calls: list[str] = field(default_factory=list)
    failing: dict[str, CUresult] = field(default_factory=dict)
    memory: dict[int, bytearray] = field(default_factory=dict)
    handles: dict[int, int] = field(default_factory=dict)
    ranges: dict[int, Range] = field(default_factory=dict)
    contexts: list[str] = field(default_factory=list)
    unsynchronized: bool = False
    """Something was given to the GPU and nobody has waited for it."""
    lies_on: dict[int, int] = field(default_factory=dict)
    """Where each allocation is."""
    joined: bool = True
    """A link joins the GPUs."""
    accesses: list[tuple[int, int]] = field(default_factory=list)
    """(GPU that was given access, GPU that the memory is on), in order."""
    retained: set[int] = field(default_factory=set)
    """GPUs with a context."""
    _next: int = 1

    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR="fd")
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="rw")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED="recommended")

    @staticmethod
    def CUmemAllocationProp() -> SimpleNamespace:  # noqa: N802 - the driver's name
        return SimpleNamespace(type=None, location=SimpleNamespace(type=None, id=None), requestedHandleTypes=None)

    @staticmethod
    def CUmemAccessDesc() -> SimpleNamespace:  # noqa: N802 - the driver's name
        return SimpleNamespace(location=SimpleNamespace(type=None, id=None), flags=None)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Result:
            self.calls.append(name)
            if name in self.failing:
                return self.failing[name], 0
            found: Result = getattr(self, "_" + name)(*arguments)
            return found

        return call

    @property
    def left(self) -> dict[str, int]:
        """What the process has not given back."""
        mapped = sum(one.content is not None for one in self.ranges.values())
        return {
            "handles": len(self.handles),
            "ranges": len(self.ranges),
            "mapped": mapped,
            "pushed": len(self.contexts),
        }

    # --- devices and contexts -------------------------------------------------------------------------------------

    def _cuInit(self, flags: int) -> Result:  # noqa: N802
        return OK

    def _cuDeviceGetCount(self) -> Result:  # noqa: N802
        return *OK, len(UUIDS)

    def _cuDeviceGet(self, ordinal: int) -> Result:  # noqa: N802
        return *OK, ("device", ordinal)

    def _cuDeviceGetUuid(self, device: tuple[str, int]) -> Result:  # noqa: N802
        return *OK, SimpleNamespace(bytes=bytes.fromhex(UUIDS[device[1]][4:].replace("-", "")))

    def _cuDevicePrimaryCtxRetain(self, device: tuple[str, int]) -> Result:  # noqa: N802
        self.retained.add(device[1])
        return *OK, f"context of {device[1]}"

    def _cuCtxPushCurrent(self, context: str) -> Result:  # noqa: N802
        self.contexts.append(context)
        return OK

    def _cuCtxPopCurrent(self) -> Result:  # noqa: N802
        return *OK, self.contexts.pop()

    def _cuCtxSynchronize(self) -> Result:  # noqa: N802
        if not self.contexts:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        self.unsynchronized = False
        return OK

    # --- allocations ----------------------------------------------------------------------------------------------

    def _cuMemGetAllocationGranularity(self, properties: SimpleNamespace, flag: str) -> Result:  # noqa: N802
        return *OK, GRANULE

    def _cuMemCreate(self, size: int, properties: SimpleNamespace, flags: int) -> Result:  # noqa: N802
        if size % GRANULE or properties.requestedHandleTypes != "fd" or properties.location.type != "device":
            return INVALID
        if size > self.total_bytes:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        number = self._new()
        self.lies_on[number] = properties.location.id
        self.memory[number] = bytearray(b"\xa5" * size)  # anything but zeros
        return *OK, self._handle(number)

    def _cuMemRelease(self, handle: int) -> Result:  # noqa: N802
        return OK if self.handles.pop(handle, None) else INVALID[:1]

    def _cuMemExportToShareableHandle(self, handle: int, kind: str, flags: int) -> Result:  # noqa: N802
        return *OK, os.eventfd(self.handles[handle], os.EFD_NONBLOCK)

    def _cuMemImportFromShareableHandle(self, fd: int, kind: str) -> Result:  # noqa: N802
        try:
            number = os.eventfd_read(fd)
        except OSError:
            return INVALID
        os.eventfd_write(fd, number)
        return *OK, self._handle(number)

    # --- addresses ------------------------------------------------------------------------------------------------

    def _cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> Result:  # noqa: N802
        if size % GRANULE:
            return INVALID
        start = self._new() * 2**42
        self.ranges[start] = Range(size)
        return *OK, start

    def _cuMemAddressFree(self, address: int, size: int) -> Result:  # noqa: N802
        found = self.ranges.get(address)
        if found is None or found.size != size or found.content is not None:
            return INVALID[:1]
        del self.ranges[address]
        return OK

    def _cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> Result:  # noqa: N802
        where, content = self.ranges[address], self.memory[self.handles[handle]]
        if size > where.size or where.content is not None or size % GRANULE:
            return INVALID[:1]
        if size != len(content):
            return (CUresult.CUDA_ERROR_NOT_SUPPORTED,)
        where.content, where.mapped, where.allowed = content, size, False
        where.lies_on = self.lies_on[self.handles[handle]]
        return OK

    def _cuMemUnmap(self, address: int, size: int) -> Result:  # noqa: N802
        where = self.ranges[address]
        if where.content is None or size != where.mapped or self.unsynchronized:
            return INVALID[:1]
        where.content = None
        return OK

    def _cuMemSetAccess(self, address: int, size: int, access: list[SimpleNamespace], count: int) -> Result:  # noqa: N802
        where = self.ranges[address]
        if where.mapped != size or access[0].flags != "rw" or count != 1:
            return INVALID[:1]
        if access[0].location.id != where.lies_on and not self.joined:
            return (CUresult.CUDA_ERROR_INVALID_DEVICE,)
        self.accesses.append((access[0].location.id, where.lies_on))
        where.allowed = True
        return OK

    # --- copies ---------------------------------------------------------------------------------------------------

    def _cuMemcpyDtoH(self, target: bytearray, address: int, size: int) -> Result:  # noqa: N802
        content, offset = self._at(address)
        if content is None or self.unsynchronized:
            return (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
        target[:] = content[offset : offset + size]
        return OK

    def _cuMemcpyHtoD(self, address: int, source: bytes, size: int) -> Result:  # noqa: N802
        content, offset = self._at(address)
        if content is None or len(source) != size:
            return (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
        content[offset : offset + size] = source
        self.unsynchronized = True
        return OK

    def _cuMemsetD8(self, address: int, value: int, size: int) -> Result:  # noqa: N802
        content, offset = self._at(address)
        if content is None:
            return (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
        content[offset : offset + size] = bytes([value]) * size
        self.unsynchronized = True
        return OK

    def _at(self, address: int) -> tuple[bytearray | None, int]:
        if not self.contexts:
            return None, 0
        for start, one in self.ranges.items():
            if start <= address < start + one.size and one.allowed:
                return one.content, address - start
        return None, 0

    def _handle(self, number: int) -> int:
        handle = self._new()
        self.handles[handle] = number
        return handle

    def _new(self) -> int:
        self._next += 1
        return self._next
