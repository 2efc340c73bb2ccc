"""Which operations torch runs, and how large what they return is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Operation:
    name: str
    elements: int
    """Of the largest tensor returned; views count as large as they look."""


class Operations(TorchDispatchMode):
    """Remembers, in order, every operation below autograd inside the `with` block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Operation] = []

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in _pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        self.seen.append(Operation(str(func), max((tensor.numel() for tensor in tensors), default=0)))
        return out
