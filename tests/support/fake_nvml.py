# ruff: noqa: N802 - the names are those of pynvml
"""What `rollplex.gpu.nvml` uses of pynvml, over numbers that a test sets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class NvmlError(Exception):
    """As pynvml.NVMLError."""


class FakeNvml:
    """One machine, whose GPUs are alike. `fail`: names of functions that raise. `used_by`: of a GPU by its number,
    where it is not `used`; `compute_on` likewise."""

    NVMLError = NvmlError
    NVML_COMPUTEMODE_DEFAULT = 0
    NVML_COMPUTEMODE_PROHIBITED = 2
    NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3

    def __init__(self, *, total: int = 140 * 2**30, used: int = 2**29, count: int = 1, cuda: int = 13_000) -> None:
        self.total, self.used, self.count, self.cuda = total, used, count, cuda
        self.mode, self.mig = 0, 0
        self.used_by: dict[int, int] = {}
        self.compute_on: dict[int, list[tuple[int, int | None]]] = {}
        self.compute: list[tuple[int, int | None]] = []
        self.mps: list[tuple[int, int | None]] = []
        self.fail: set[str] = set()
        self.open = 0

    def _may(self, name: str) -> None:
        if name in self.fail:
            raise NvmlError(f"{name} failed")

    def nvmlInit(self) -> None:
        self._may("nvmlInit")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self._may("nvmlDeviceGetHandleByIndex")
        return f"handle {index}"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:
        number = _number(handle)
        return f"GPU-1234-{number}".encode() if number else b"GPU-1234"

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        self._may("nvmlDeviceGetMemoryInfo")
        used = self.used_by.get(_number(handle), self.used)
        return SimpleNamespace(total=self.total, used=used, free=self.total - used)

    def nvmlDeviceGetComputeMode(self, handle: str) -> int:
        return self.mode

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[int, int]:
        self._may("nvmlDeviceGetMigMode")
        return self.mig, self.mig

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        self._may("nvmlDeviceGetComputeRunningProcesses")
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=used)
            for pid, used in self.compute_on.get(_number(handle), self.compute)
        ]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: str) -> list[Any]:
        self._may("nvmlDeviceGetMPSComputeRunningProcesses")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.mps]


def _number(handle: str) -> int:
    return int(handle.removeprefix("handle "))
