"""Nothing of the transformers engine mixes tensors of the host with those of its device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from rollplex.errors import BudgetError
from rollplex.protocol.common import Committed, DigestRequest, Drain, Kind, LeaseRef
from rollplex.protocol.rollout import GenerateUnit, GroupFinished, LoadRollout
from rollplex_rollout import transformers_engine
from rollplex_rollout.service import RolloutService
from rollplex_rollout.transformers_engine import TransformersEngine
from support.on_device import put_on_device

if TYPE_CHECKING:
    from rollout.conftest import Node

VERSION = 5


def generate(node: Node, **sampling: Any) -> GenerateUnit:
    return GenerateUnit(
        cause=2,
        step=7,
        version=VERSION,
        unit=3,
        inputs=node.inputs_ref,
        prompts=node.slots,
        sampling=node.sampling(**sampling),
        kv=LeaseRef(lease=44, kind=Kind.ROLLOUT_KV, size_bytes=10**8),
    )


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0, "group_size": 1}, {"top_p": 0.7, "top_k": 20}])
def test_a_unit_is_decoded_on_the_device_and_drawn_as_on_the_host(
    node: Node, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    def run() -> list[Any]:
        service, replies = RolloutService(node.segments), list[Any]()
        service.handle(LoadRollout(cause=1, model=node.spec, actor=node.actor_ref), replies.append)
        service.handle(generate(node, **sampling), replies.append)
        service.handle(DigestRequest(cause=3), replies.append)
        service.handle(Drain(cause=4, version=VERSION), replies.append)
        service.handle(Committed(cause=5, version=VERSION), replies.append)
        return [(reply.responses, reply.logprobs) for reply in replies if isinstance(reply, GroupFinished)]

    on_host = run()
    devices = put_on_device(monkeypatch, RolloutService)
    node.segments.detach(node.actor_ref.segment)  # so that it is attached, as the device's, by the next service
    assert run() == on_host
    assert len(on_host) == len(node.slots)
    assert devices.seen > 100


def test_what_a_unit_leaves_with_the_allocator_is_given_back_and_too_much_is_an_error_with_the_plan(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    story: list[str] = []
    monkeypatch.setattr(transformers_engine, "trim", lambda device: story.append(f"trim {device.type}"))
    monkeypatch.setattr(transformers_engine, "limit_private", lambda _, cap: story.append(f"cap {cap}"))
    engine = TransformersEngine(node.setup)
    engine.generate(node.unit(), lambda _: None)
    assert story == ["cap 0", "trim cpu"]

    def short(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(transformers_engine, "prefix_forward", short)
    with pytest.raises(BudgetError, match=f"step 2 needs more private memory.*{engine.kv_bytes(node.unit())} bytes"):
        engine.generate(node.unit(), lambda _: None)
    assert story[-1] == "trim cpu"
