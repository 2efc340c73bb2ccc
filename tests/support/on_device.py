"""A service on the second device of `support.two_devices`: its segments but inputs lie there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from rollplex.memory.segment import Mapping
from rollplex.memory.tensors import tensor
from rollplex.model import setup
from rollplex.model.logprob import forbidden_ids
from rollplex.model.vision import vision_plan
from rollplex.protocol.common import Kind, SegmentRef
from support.segments import HostSegments
from support.two_devices import DEVICE, TwoDevices


def put_on_device(monkeypatch: pytest.MonkeyPatch, service: type[Any]) -> TwoDevices:
    """Services of this class, made from now on, compute there."""
    devices = TwoDevices()
    for kept in (forbidden_ids, vision_plan):
        kept.cache_clear()  # of another test's devices
    attach, detach, handle = HostSegments.attach, HostSegments.detach, service.handle

    def claiming(self: HostSegments, ref: SegmentRef) -> Mapping:
        mapping = attach(self, ref)
        if ref.kind is not Kind.INPUTS:
            with _disable_current_modes():
                start = tensor(mapping, 0, (1,), torch.uint8).data_ptr()
            devices.claim(ref.segment, start, mapping.size_bytes)
        return mapping

    def giving_back(self: HostSegments, segment: int) -> None:
        detach(self, segment)
        devices.give_back(segment)

    def active(self: Any, message: Any, reply: Any) -> None:
        with devices.active():
            handle(self, message, reply)

    monkeypatch.setattr(setup, "torch_device", lambda _memory: DEVICE)
    monkeypatch.setattr(HostSegments, "attach", claiming)
    monkeypatch.setattr(HostSegments, "detach", giving_back)
    monkeypatch.setattr(service, "handle", active)
    return devices
