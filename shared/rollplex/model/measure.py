"""How many bytes the passes really hold.

Owns: counting the storages that a forward saved for its backward, and the scratch of the output layer. Does not know:
what they were predicted to be (`rollplex.memory.predict`), leases.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import torch
from torch import Tensor


class GraphMeter:
    """Counts what a graph holds. Everything saved inside the `with` block counts, as long as the graph keeps it.

    with GraphMeter() as meter:
        state = prefix_forward(model, batch, grad=True)
    meter.held_bytes(outputs, excluding=model.parameters())
    """

    def __init__(self) -> None:
        self._boxes: list[weakref.ref[_Box]] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def saved(self) -> list[Tensor]:
        """The saved tensors that the graph still keeps, in the order in which they were saved; storages may repeat."""
        return [box.tensor for box in (ref() for ref in self._boxes) if box is not None]

    def held_bytes(self, outputs: Iterable[Tensor] = (), *, excluding: Iterable[Tensor] = ()) -> int:
        """Bytes of distinct storages.

        Args:
            outputs: tensors that the caller keeps besides the graph; counted too.
            excluding: tensors whose storages are accounted for elsewhere: parameters, K/V of a segment.
        """
        return storage_bytes((*self.saved(), *outputs), excluding=excluding)

    def _pack(self, tensor: Tensor) -> _Box:
        box = _Box(tensor.detach())  # a node that saves its own output would otherwise hold itself for ever
        self._boxes.append(weakref.ref(box))
        return box


class _Box:
    """What the graph keeps in place of a saved tensor; dies with the node that saved it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _unpack(box: _Box) -> Tensor:
    return box.tensor


def storage_bytes(tensors: Iterable[Tensor], *, excluding: Iterable[Tensor] = ()) -> int:
    """Bytes of the distinct storages behind `tensors`, without those behind `excluding`."""
    known = {tensor.untyped_storage().data_ptr() for tensor in excluding}
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            total += storage.nbytes()
    return total


class ScratchMeter:
    """The most scratch that `note_scratch` was told of inside the `with` block, in bytes.

    One at a time in a process.
    """

    active: ScratchMeter | None = None

    def __init__(self) -> None:
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        ScratchMeter.active = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ScratchMeter.active = None


def note_scratch(*tensors: Tensor) -> None:
    """Tells the active meter, if any, that these temporary tensors are alive at the same time."""
    if ScratchMeter.active is not None:
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        ScratchMeter.active.peak_bytes = max(ScratchMeter.active.peak_bytes, size_bytes)
