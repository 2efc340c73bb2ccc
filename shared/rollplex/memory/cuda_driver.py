"""The CUDA driver's calls that segments need, typed, with errors that name what the driver said.

Owns: the way to cuda.bindings.driver, and the count of what this process holds of the driver. Does not know: segments,
tensors, when anything is given back. The binding is imported with the first `Driver`, never with this module, and
nothing here needs torch.

    works without a context in the process       needs one (`using`)
    -----------------------------------------    ---------------------------------
    device, granularity, create, export          synchronize, to_host, to_device,
    import_fd, release, reserve, free            zero
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from rollplex.errors import SegmentError

_BINDING: Final = "cuda.bindings.driver"
_WHY: Final = {
    "CUDA_ERROR_OUT_OF_MEMORY": "The GPU has too little free memory: lower memory.budget, or end what else runs on it.",
    "CUDA_ERROR_NO_DEVICE": "This process sees no GPU: look at CUDA_VISIBLE_DEVICES.",
    "CUDA_ERROR_NOT_SUPPORTED": "This GPU or driver cannot share memory between processes by descriptors.",
    "CUDA_ERROR_MPS_CONNECTION_FAILED": "The MPS daemon does not answer: look at its log.",
}


class CudaError(SegmentError):
    """A call of the driver that did not succeed. `code`: the driver's name of the error."""

    code: str = ""


@dataclass(kw_only=True)
class Live:
    """What this process holds of the driver now. All zero: nothing leaks."""

    handles: int = 0
    """Allocations made or imported, and not released."""
    reservations: int = 0
    """Address ranges."""
    mappings: int = 0


class Driver:
    """The driver of this process.

    Args:
        binding: the module cuda.bindings.driver; None imports it. Tests have their own.

    Raises:
        SegmentError: there is no binding, no driver, or no GPU.
    """

    def __init__(self, binding: Any = None) -> None:
        self._cu = _binding() if binding is None else binding
        self.live = Live()
        self._contexts: dict[int, Any] = {}
        try:
            self._do("cuInit", 0)
        except RuntimeError as error:  # the binding's own, where libcuda cannot be loaded
            raise SegmentError(
                "There is no CUDA driver on this machine", got=str(error), do="Use device.kind: host."
            ) from error

    # --- devices --------------------------------------------------------------------------------------------------

    def device(self, uuid: str | None, ordinal: int) -> int:
        """The number by which this process knows a GPU: that with `uuid` (as nvidia-smi writes it), or the `ordinal`th.

        Raises:
            SegmentError: there is none; names those that this process sees.
        """
        count = int(self._do("cuDeviceGetCount"))
        if uuid is None:
            if ordinal >= count:
                raise SegmentError("There is no such GPU", got=f"number {ordinal}", needed=f"one of {count}")
            return ordinal
        seen = [self.uuid(number) for number in range(count)]
        if uuid not in seen:
            raise SegmentError(
                "There is no such GPU",
                got=uuid,
                needed=f"one that this process sees: {', '.join(seen) or 'none'}",
                do="Look at CUDA_VISIBLE_DEVICES.",
            )
        return seen.index(uuid)

    def uuid(self, device: int) -> str:
        """As nvidia-smi writes it: GPU-8-4-4-4-12 hexadecimal digits."""
        digits = bytes(self._do("cuDeviceGetUuid", self._device(device)).bytes).hex()
        return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    # --- allocations ----------------------------------------------------------------------------------------------

    def granularity(self, device: int) -> int:
        """Bytes that sizes must be a multiple of."""
        flag = self._cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self._do("cuMemGetAllocationGranularity", self._properties(device), flag))

    def create(self, device: int, size_bytes: int) -> Any:
        """A handle of new memory, which can be exported."""
        handle = self._do("cuMemCreate", size_bytes, self._properties(device), 0)
        self.live.handles += 1
        return handle

    def export(self, handle: Any) -> int:
        """A descriptor of the memory, which the caller closes. It keeps the memory as a handle does."""
        return int(self._do("cuMemExportToShareableHandle", handle, self._by_fd, 0))

    def import_fd(self, fd: int) -> Any:
        """A handle of the memory that `fd` names. The descriptor stays the caller's."""
        handle = self._do("cuMemImportFromShareableHandle", fd, self._by_fd)
        self.live.handles += 1
        return handle

    def release(self, handle: Any) -> None:
        """Give a handle back; once for each `create` and `import_fd`. What is mapped stays mapped."""
        self._do("cuMemRelease", handle)
        self.live.handles -= 1

    # --- addresses ------------------------------------------------------------------------------------------------

    def reserve(self, size_bytes: int) -> int:
        """The first address of a new range."""
        address = int(self._do("cuMemAddressReserve", size_bytes, 0, 0, 0))
        self.live.reservations += 1
        return address

    def free(self, address: int, size_bytes: int) -> None:
        """Give a whole range back."""
        self._do("cuMemAddressFree", address, size_bytes)
        self.live.reservations -= 1

    def map(self, address: int, size_bytes: int, handle: Any) -> None:
        """Lay memory into a reserved range of exactly its size, inaccessible yet."""
        self._do("cuMemMap", address, size_bytes, 0, handle, 0)
        self.live.mappings += 1

    def unmap(self, address: int, size_bytes: int) -> None:
        """Undo one `map`, in whole."""
        self._do("cuMemUnmap", address, size_bytes)
        self.live.mappings -= 1

    def allow(self, address: int, size_bytes: int, device: int) -> None:
        """Let a GPU read and write mapped memory."""
        access = self._cu.CUmemAccessDesc()
        access.location.type = self._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = self._cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._do("cuMemSetAccess", address, size_bytes, [access], 1)

    # --- contexts and copies --------------------------------------------------------------------------------------

    @contextmanager
    def using(self, device: int) -> Iterator[None]:
        """With the GPU's primary context, torch's own, as the current one of this thread. Made if there is none yet,
        and kept until the process ends."""
        if device not in self._contexts:
            self._contexts[device] = self._do("cuDevicePrimaryCtxRetain", self._device(device))
        self._do("cuCtxPushCurrent", self._contexts[device])
        try:
            yield
        finally:
            self._do("cuCtxPopCurrent")

    def synchronize(self) -> None:
        """Until all that this process has given to the GPU is done, on every stream and green context."""
        self._do("cuCtxSynchronize")

    def to_host(self, address: int, size_bytes: int) -> bytes:
        """A copy of some bytes."""
        content = bytearray(size_bytes)
        self._do("cuMemcpyDtoH", content, address, size_bytes)
        return bytes(content)

    def to_device(self, address: int, content: bytes) -> None:
        """Copy bytes in. They may still be on their way: `synchronize`."""
        self._do("cuMemcpyHtoD", address, content, len(content))

    def zero(self, address: int, size_bytes: int) -> None:
        """Make bytes 0. They may still be on their way: `synchronize`."""
        self._do("cuMemsetD8", address, 0, size_bytes)

    # --- the binding ----------------------------------------------------------------------------------------------

    @property
    def _by_fd(self) -> Any:
        return self._cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _device(self, number: int) -> Any:
        return self._do("cuDeviceGet", number)

    def _properties(self, device: int) -> Any:
        properties = self._cu.CUmemAllocationProp()
        properties.type = self._cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        properties.requestedHandleTypes = self._by_fd
        return properties

    def _do(self, call: str, *arguments: Any) -> Any:
        """Call the driver. Every call of the binding returns a tuple: the result, then at most one value of these."""
        result, *values = getattr(self._cu, call)(*arguments)
        if int(result) != 0:
            code = str(getattr(result, "name", result))
            error = CudaError(f"The CUDA driver refused {call}", got=code, do=_WHY.get(code, ""))
            error.code = code
            raise error
        return values[0] if values else None


def _binding() -> Any:
    try:
        return importlib.import_module(_BINDING)
    except ImportError as error:
        raise SegmentError(
            "The package that speaks to the CUDA driver is not installed",
            got=str(error),
            needed=_BINDING,
            do="pip install 'rollplex[cuda]'",
        ) from error
