"""One GPU seen from outside: what it is, how much of its memory is used, and by whom.

Owns the calls to NVML (package nvidia-ml-py, imported when it is first needed) and the refusals that follow from what
NVML says. Knows nothing of leases. NVML makes no CUDA context, so that looking costs no HBM, and needs no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from rollplex.errors import ConfigError, RollplexError

MIN_CUDA = 13_000
"""What the driver must support, as NVML counts (13.0): that which cuda-bindings, our way to segments, is made for."""
MAX_SHOWN = 120
"""Characters of a program's words."""


class GpuInfo(Struct, frozen=True, kw_only=True):
    """What does not change while a run lives."""

    index: int
    """As nvidia-smi counts."""
    uuid: str
    name: str
    driver: str
    total_bytes: int

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, driver {self.driver})"


class GpuProcess(Struct, frozen=True, kw_only=True):
    """A process with a CUDA context on the GPU. used_bytes: None where the driver does not tell."""

    pid: int
    used_bytes: int | None


class GpuError(RollplexError):
    """NVML could not answer."""


class Gpu:
    """One GPU; `close` when it is looked at no more. Reading is thread-safe, as NVML is.

    Args:
        library: `pynvml`, or what has the functions of it that are used here.
        index: of the GPU.

    Raises:
        ConfigError: there is no such GPU, or not one that several processes can use through Rollplex.
    """

    def __init__(self, library: Any, index: int) -> None:
        self._nvml = library
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            raise ConfigError(
                "The GPU driver cannot be asked",
                got=str(error),
                needed="an NVIDIA driver that runs",
                do="Install or load it (`nvidia-smi` must list a GPU), or set device.kind to host.",
                where="device.kind",
            ) from error
        try:
            self._handle, self.info = self._find(index)
            self._check_shareable()
        except BaseException:
            library.nvmlShutdown()
            raise

    @property
    def count(self) -> int:
        """GPUs of this machine.

        Raises:
            GpuError: the driver does not answer.
        """
        try:
            return int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as error:
            raise GpuError("the driver does not tell how many GPUs there are", got=str(error)) from error

    @property
    def index(self) -> int:
        return self.info.index

    def used_bytes(self) -> int:
        """HBM that is not free: of all processes and of the driver itself.

        Raises:
            GpuError: the driver does not answer.
        """
        try:
            return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        except self._nvml.NVMLError as error:
            raise GpuError(
                "the driver does not tell how much of the GPU's memory is used", got=str(error), where=str(self.info)
            ) from error

    def processes(self) -> tuple[GpuProcess, ...]:
        """Who computes on it, clients of MPS too, in order of pid.

        Raises:
            GpuError: the driver does not answer.
        """
        found: dict[int, int | None] = {}
        try:
            listed = list(self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
        except self._nvml.NVMLError as error:
            raise GpuError(
                "the driver does not list the GPU's processes", got=str(error), where=str(self.info)
            ) from error
        with suppress(self._nvml.NVMLError):  # where MPS is not supported, it has no clients
            listed += self._nvml.nvmlDeviceGetMPSComputeRunningProcesses(self._handle)
        for process in listed:
            told = process.usedGpuMemory
            found[process.pid] = found.get(process.pid) if told is None else int(told)
        return tuple(GpuProcess(pid=pid, used_bytes=used) for pid, used in sorted(found.items()))

    def close(self) -> None:
        """Again: nothing happens."""
        if self._handle is not None:
            self._handle = None
            self._nvml.nvmlShutdown()

    def _find(self, index: int) -> tuple[Any, GpuInfo]:
        nvml = self._nvml
        try:
            count = int(nvml.nvmlDeviceGetCount())
            if index >= count:
                raise ConfigError(
                    "There is no such GPU",
                    got=f"GPU {index} of {count}",
                    needed="a number below that, as nvidia-smi counts" if count else "at least one GPU",
                    do="Change device.gpu." if count else "Set device.kind to host.",
                    where="device.gpu" if count else "device.kind",
                )
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            driver, cuda = _text(nvml.nvmlSystemGetDriverVersion()), int(nvml.nvmlSystemGetCudaDriverVersion())
            info = GpuInfo(
                index=index,
                uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
                name=_text(nvml.nvmlDeviceGetName(handle)),
                driver=driver,
                total_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            )
        except nvml.NVMLError as error:
            raise ConfigError(
                "The GPU cannot be used",
                got=str(error),
                do="See what nvidia-smi says of it; set device.gpu to another, or device.kind to host.",
                where="device.gpu",
            ) from error
        if cuda < MIN_CUDA:
            raise ConfigError(
                "The GPU driver is too old",
                got=f"driver {driver}, for CUDA {cuda // 1000}.{cuda % 1000 // 10}",
                needed=f"one for CUDA {MIN_CUDA // 1000}.{MIN_CUDA % 1000 // 10} or newer",
                do="Install a newer driver, or set device.kind to host.",
                where="device.kind",
            )
        return handle, info

    def _check_shareable(self) -> None:
        nvml = self._nvml
        mode = int(nvml.nvmlDeviceGetComputeMode(self._handle))
        if mode != nvml.NVML_COMPUTEMODE_DEFAULT:
            raise ConfigError(
                "The GPU's compute mode keeps several processes off it",
                got="prohibited" if mode == nvml.NVML_COMPUTEMODE_PROHIBITED else "exclusive",
                needed="the default mode: three workers use it, and the coordinator makes their memory",
                do=f"Let an administrator run `nvidia-smi -i {self.index} -c DEFAULT`, or choose another GPU.",
                where="device.gpu",
            )
        try:
            current, _ = nvml.nvmlDeviceGetMigMode(self._handle)
        except nvml.NVMLError:
            return  # a GPU that has no such mode
        if current:
            raise ConfigError(
                "The GPU is divided into instances (MIG)",
                got="MIG enabled",
                needed="a whole GPU",
                do="Choose another GPU, or have MIG switched off.",
                where="device.gpu",
            )


def library() -> Any:
    """NVML's Python module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise ConfigError(
            "A package is missing that says how much of a GPU's memory is used",
            got=str(error),
            needed="nvidia-ml-py",
            do="pip install 'rollplex[cuda]', or set device.kind to host.",
            where="device.kind",
        ) from error


def open_gpu(index: int) -> Gpu:
    """A GPU of this machine.

    Raises:
        ConfigError: as `Gpu` and `library`.
    """
    return Gpu(library(), index)


def check_alone(gpu: Gpu, ours: Collection[int], *, budget_is_set: bool) -> tuple[GpuProcess, ...]:
    """Others on the GPU: whoever else may allocate there can take what a lease was promised.

    Args:
        ours: pids that do not count.
        budget_is_set: the user has said how much is ours, so others are only returned.

    Returns:
        The others.

    Raises:
        ConfigError: there are others, and nobody said how much is ours.
    """
    others = tuple(process for process in gpu.processes() if process.pid not in ours)
    if others and not budget_is_set:
        raise ConfigError(
            "Other processes use the GPU",
            got=described(others),
            needed="a GPU of our own, or a budget that leaves them theirs",
            do="End them, choose another GPU with device.gpu, or set memory.budget to what is ours.",
            where=f"device.gpu: {gpu.info}",
        )
    return others


def described(processes: Collection[GpuProcess]) -> str:
    """For errors and logs: pid, program and MiB of each."""
    return ", ".join(
        f"pid {process.pid} ({_program(process.pid)}) with "
        + ("an unknown amount" if process.used_bytes is None else f"{process.used_bytes / 2**20:,.0f} MiB")
        for process in processes
    )


def _program(pid: int) -> str:
    """What a process runs, in the words that it was started with; less of one that ends, or is in another container."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return words[:MAX_SHOWN] or f"{Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()}, ending"
    except OSError:
        return "not in sight"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
