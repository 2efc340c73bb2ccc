"""Stands in for SGLang's kernels on a machine without a GPU, of which no build for a CPU is published.

SGLang takes the names at import and falls back to torch where its CPU engine runs without AMX. Every call raises.

Its ranks on a CPU use torch's collectives, but make a communicator of NCCL's beside them; a switched-off one is put in
that one's place, since this package is imported before.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.4.5"


def _absent(name: str) -> Callable[..., NoReturn]:
    def call(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} has no build for this machine")

    return call


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _absent(f"sgl_kernel.{name}")


class _Ops:
    """torch.ops.sgl_kernel, where names that end in _cpu are there."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not name.endswith("_cpu"):
            return getattr(self._real, name)
        return _absent(f"torch.ops.sgl_kernel.{name}")


torch.ops.sgl_kernel = _Ops(torch.ops.sgl_kernel)  # type: ignore[attr-defined]


class PyNcclCommunicator:
    """As one that found no library."""

    available = False
    disabled = True

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Takes what the real one takes."""


_pynccl: Any = types.ModuleType("sglang.srt.distributed.device_communicators.pynccl")
_pynccl.PyNcclCommunicator = PyNcclCommunicator
sys.modules.setdefault(_pynccl.__name__, _pynccl)
