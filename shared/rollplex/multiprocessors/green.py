"""The CUDA driver's green contexts, typed: parts of a device's multiprocessors that kernels keep to.

Owns: the calls, and errors that name them. Does not know what runs where, nor torch. The binding is imported with the
first `GreenDriver`. Memory and modules are those of the device's primary context, torch's own; a green context only
narrows where kernels go.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from rollplex.errors import RollplexError
from rollplex.multiprocessors.cut import Side

_BINDING = "cuda.bindings.driver"


class MultiprocessorError(RollplexError):
    """Multiprocessors that cannot be set apart."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some of a device's multiprocessors. `green` and `context` are the driver's."""

    count: int
    green: Any
    context: Any


class GreenDriver:
    """The driver of this process, for one device.

    Args:
        device: its number, as this process sees it.
        binding: the module cuda.bindings.driver; None imports it. Tests have their own.

    Raises:
        MultiprocessorError: there is no binding, no driver, or no such device.
    """

    def __init__(self, device: int = 0, binding: Any = None) -> None:
        self._cu = _binding() if binding is None else binding
        self._do("cuInit", 0)
        self._device = self._do("cuDeviceGet", device)

    @property
    def count(self) -> int:
        """Multiprocessors of the device."""
        return int(self._all().sm.smCount)

    @property
    def major(self) -> int:
        """Of its compute capability."""
        attribute = self._cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        return int(self._do("cuDeviceGetAttribute", attribute, self._device))

    def part(self, first: int, side: Side) -> Part:
        """The first `first` multiprocessors of the device, or the others. Kept until the process ends.

        Raises:
            MultiprocessorError: the driver cuts elsewhere, or not at all.
        """
        groups, _, others = self._do("cuDevSmResourceSplitByCount", 1, self._all(), 0, first)
        if int(groups[0].sm.smCount) != first:
            raise MultiprocessorError(
                "The driver cuts the GPU's multiprocessors elsewhere than asked, so that two processes could overlap",
                got=f"{groups[0].sm.smCount} of {self.count}",
                needed=f"{first}",
                do="Set device.prefix_share and device.decode_share to 1.",
            )
        resource = groups[0] if side is Side.FIRST else others
        described = self._do("cuDevResourceGenerateDesc", [resource], 1)
        flags = self._cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        green = self._do("cuGreenCtxCreate", described, self._device, flags)
        return Part(count=int(resource.sm.smCount), green=green, context=self._do("cuCtxFromGreenCtx", green))

    def stream(self, part: Part) -> int:
        """A new stream whose kernels keep to the part: a cudaStream_t, for torch.cuda.ExternalStream. Kept."""
        return int(self._do("cuGreenCtxStreamCreate", part.green, self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))

    def enter(self, part: Part) -> None:
        """Make the part's context this thread's current one: its default stream is now the part's."""
        self._do("cuCtxPushCurrent", part.context)

    def leave(self) -> None:
        """Undo the last `enter`."""
        self._do("cuCtxPopCurrent")

    def synchronize(self) -> None:
        """Until all work of the current context is done; of the primary one, that of its parts too."""
        self._do("cuCtxSynchronize")

    def _all(self) -> Any:
        kind = self._cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        return self._do("cuDeviceGetDevResource", self._device, kind)

    def _do(self, call: str, *arguments: Any) -> Any:
        """Call the driver; its values, without the result that every call begins with."""
        try:
            result, *values = getattr(self._cu, call)(*arguments)
        except (AttributeError, RuntimeError) as error:  # a binding too old, or one that finds no libcuda
            raise MultiprocessorError(
                f"The CUDA driver has no {call}", got=str(error), needed="a driver of CUDA 12.4 or later"
            ) from error
        if int(result) != 0:
            raise MultiprocessorError(
                f"The CUDA driver refused {call}",
                got=str(getattr(result, "name", result)),
                do="Set device.prefix_share and device.decode_share to 1 to do without.",
            )
        return values[0] if len(values) == 1 else tuple(values)


def _binding() -> Any:
    try:
        return importlib.import_module(_BINDING)
    except ImportError as error:
        raise MultiprocessorError(
            "The package that speaks to the CUDA driver is not installed",
            got=str(error),
            needed=_BINDING,
            do="pip install 'rollplex[cuda]'",
        ) from error
