"""GPUs: which there are, whether a run could use one, and what goes with it. Without one nothing is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rollplex.cli.doctor.finding import Finding, note, ok, problem
from rollplex.cli.doctor.outside import said
from rollplex.errors import ConfigError, RollplexError, SegmentError
from rollplex.memory.segment import Backend, backend
from rollplex.nvml import Gpu, library
from rollplex.terminal.words import size

MPS_CONTROL = "nvidia-cuda-mps-control"
NONE = "none: host memory is used"
_PAGE_BYTES = 4096
_CUDA = "pip install 'rollplex[cuda]'"


def check(
    root: Path = Path("/"),
    nvml: Callable[[], Any] = library,
    segments: Callable[[str], Backend] = lambda uuid: backend("cuda", uuid=uuid),
) -> Iterator[Finding]:
    """One line per GPU, then what goes with one.

    Args:
        root: where proc/ is; tests make their own.
        nvml: loads NVML's module.
        segments: makes segments on the GPU of a UUID.
    """
    try:
        loaded = nvml()
    except ConfigError as error:
        yield _without_nvml(root, error)
        return
    count = _count(loaded)
    if not count:
        yield _no_gpu(root)
        return
    for index in range(count):
        yield from _gpu(loaded, index, segments)
    yield _mps()


def _count(loaded: Any) -> int:
    try:
        loaded.nvmlInit()
        try:
            return int(loaded.nvmlDeviceGetCount())
        finally:
            loaded.nvmlShutdown()
    except loaded.NVMLError:
        return 0


def _gpu(loaded: Any, index: int, segments: Callable[[str], Backend]) -> Iterator[Finding]:
    topic = f"gpu {index}"
    try:
        gpu = Gpu(loaded, index)
    except ConfigError as error:
        yield note(topic, f"{error.what}; got {error.got}", error.do)
        return
    try:
        info, used, others = gpu.info, gpu.used_bytes(), gpu.processes()
    except RollplexError as error:
        yield note(topic, str(error), "See what nvidia-smi says.")
        return
    finally:
        gpu.close()
    text = f"{info.name}, {size(info.total_bytes)}, {size(info.total_bytes - used)} free, driver {info.driver}"
    if others:
        pids = ", ".join(str(process.pid) for process in others)
        yield note(topic, f"{text}; in use by pid {pids}", "A run there needs a memory.budget, or their end.")
    else:
        yield ok(topic, text)
    yield _segment(f"gpu {index} segments", segments, info.uuid)


def _segment(topic: str, segments: Callable[[str], Backend], uuid: str) -> Finding:
    """Make one and give it back: this needs the package, the driver and the size of its portions."""
    try:
        os.close(segments(uuid).create(_PAGE_BYTES, "rollplex-doctor"))
    except ImportError as error:
        return problem(topic, str(error), _CUDA)
    except (SegmentError, OSError) as error:
        return problem(topic, str(error), getattr(error, "do", "") or _CUDA)
    return ok(topic, "device memory can be made and exported without a CUDA context (cuda-bindings)")


def _mps() -> Finding:
    program = shutil.which(MPS_CONTROL)
    if program is None:
        do = "It comes with the driver (nvidia-compute-utils). Without it workers take turns on a GPU."
        return note("mps", f"no {MPS_CONTROL} on PATH", do)
    return ok("mps", program)


def _no_gpu(root: Path) -> Finding:
    driver = _driver(root)
    return note("gpu", driver, "No GPU answers (nvidia-smi): runs use host memory.") if driver else ok("gpu", NONE)


def _without_nvml(root: Path, error: ConfigError) -> Finding:
    """NVML's package is missing, which matters only where there is a GPU."""
    smi = shutil.which("nvidia-smi")
    found = said([smi, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]) if smi else None
    if found:
        return note("gpu", f"{'; '.join(found.splitlines())}; but {error.got}", f"To use it: {_CUDA}")
    return _no_gpu(root)


def _driver(root: Path) -> str:
    try:
        return (root / "proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""
