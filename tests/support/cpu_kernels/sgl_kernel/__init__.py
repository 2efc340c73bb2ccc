"""Stands in for SGLang's kernels on a machine without a GPU, of which no build for a CPU is published.

SGLang takes the names at import and falls back to torch where its CPU engine runs without AMX. Every call raises.
"""

from __future__ import annotations

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
