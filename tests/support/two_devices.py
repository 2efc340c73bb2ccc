"""A second device that needs no GPU: tensors that lie "on the device", told apart from those of the host.

On a machine without a GPU every tensor is on the CPU, so a forgotten `device=` goes unnoticed until the code meets one.
`TwoDevices` calls one part of the CPU's tensors the device's, as torch would with a GPU:

    on the device    views of the segments that are named so, what is made with device=DEVICE, results of its tensors
    on the host      everything else

and raises as torch would if an operation is given both, or copies between them unasked. `tensor.device` says DEVICE for
the device's, so that code which follows its inputs works. Looks at operations below autograd: backward passes too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cpu", 0)
"""Not equal to torch.device("cpu"), which is what every tensor of the CPU says of itself."""
_CROSSING = {"aten::copy_", "aten::_to_copy", "aten::_copy_from"}


_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_"}
"""Torch moves their indices (the second argument) by itself."""


class MixedDevices(Exception):  # noqa: N818 - names what happened
    """What torch raises with a GPU: tensors on at least two devices."""


class TwoDevices:
    """Use: `devices.claim(...)` the device's memory; `with devices.active(): ...`"""

    def __init__(self) -> None:
        self._ours: dict[int, bool | None] = {}
        """By address. None: made by torch itself for one of its own operations, so it is where that wants it."""
        self._ranges: dict[int, tuple[int, int]] = {}
        self._alive: list[Any] = []
        """The device's storages, so that none of their addresses is used twice."""
        self.seen = 0
        """Operations on the device's tensors."""

    @contextmanager
    def active(self) -> Iterator[TwoDevices]:
        with _Function(self), _Dispatch(self):
            yield self

    def claim(self, name: int, start: int, size_bytes: int) -> None:
        """Every tensor over these addresses lies on the device, until they are given back."""
        self._ranges[name] = (start, start + size_bytes)

    def give_back(self, name: int) -> None:
        self._ranges.pop(name, None)

    def owns(self, tensor: Tensor) -> bool | None:
        at = tensor.untyped_storage().data_ptr()
        return True if any(start <= at < end for start, end in self._ranges.values()) else self._ours.get(at, False)

    def note(self, tensor: Tensor, *, ours: bool | None) -> None:
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        if at and not any(start <= at < end for start, end in self._ranges.values()):
            if ours is False:
                self._ours.pop(at, None)
            else:
                self._alive.append(storage)
                self._ours[at] = ours


class _Function(TorchFunctionMode):
    """What never reaches the operations: `tensor.device`, moves to where a tensor is already, `tensor.numpy()`."""

    def __init__(self, devices: TwoDevices) -> None:
        super().__init__()
        self._devices = devices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.device.__get__ and args[0].numel():
            return DEVICE if self._devices.owns(args[0]) else func(*args)
        if func in {Tensor.to, Tensor.cpu}:
            return self._move(args[0], args[1:] if func is Tensor.to else ("cpu",), kwargs or {})
        if func is Tensor.numpy and self._devices.owns(args[0]):
            raise MixedDevices("numpy cannot look at a tensor of the device")
        out = func(*args, **(kwargs or {}))
        if func in _device_constructors():
            self._devices.note(out, ours=torch.device((kwargs or {}).get("device") or "cpu") == DEVICE)
        return out

    def _move(self, tensor: Tensor, given: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        every = (*given, *named.values())
        where = [g for g in every if isinstance(g, str | torch.device)]
        kinds = [g for g in every if isinstance(g, torch.dtype)]
        out = tensor.to(kinds[0]) if kinds else tensor
        if where and (torch.device(where[0]) == DEVICE) != self._devices.owns(tensor):
            out = out.clone() if out.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() else out
            self._devices.note(out, ours=torch.device(where[0]) == DEVICE)
        return out


class _Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, devices: TwoDevices) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._devices = devices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        devices, name = self._devices, func._schema.name
        looked_at = (args[0], *args[2:]) if name in _INDEXING else args
        given = [t for t in tree_leaves((looked_at, kwargs)) if isinstance(t, Tensor) and t.numel()]
        places = {devices.owns(t) for t in given if t.dim()} - {None}
        numbers = {devices.owns(t) for t in given if not t.dim()} - {None}
        # Numbers of the host go along with the device's tensors, never the other way round.
        mixed = len(places) > 1 or (places == {False} and numbers == {True})
        if mixed and name not in _CROSSING:
            shapes = [f"{'device' if devices.owns(t) else 'host'} {tuple(t.shape)}" for t in given]
            raise MixedDevices(f"{name} is given tensors of both devices: {', '.join(shapes)}")
        ours = True if places | numbers >= {True} else False if places | numbers else None
        if name == "aten::copy_":
            ours = devices.owns(args[0])
        devices.seen += bool(ours)
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                devices.note(tensor, ours=ours)
        return out
