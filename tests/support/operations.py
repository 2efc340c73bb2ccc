"""Which operations torch runs, how large what they return is, and how much of it lives at the same time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
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


class LiveBytes(TorchDispatchMode):
    """The most that lives at a time of what operations inside the `with` block return; what an operation makes and
    drops inside itself is not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(leaf)[0] for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        self._known = {key: held for key, held in self._known.items() if not held[0].expired()}  # type: ignore[no-untyped-call]
        for leaf in _pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                key, size = _storage(leaf)
                if key not in given and key not in self._known:
                    self._known[key] = StorageWeakRef(leaf.untyped_storage()), size  # type: ignore[no-untyped-call]
        self.peak = max(self.peak, sum(size for _, size in self._known.values()))
        return out


def _storage(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()
