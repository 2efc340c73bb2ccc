"""Nothing of the prefix service mixes tensors of the host with those of its device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rollplex.model.prefix import PrefixState, prefix_forward
from rollplex.protocol.common import Committed, DigestRequest, Drain, Kind, LeaseRef, Responses
from rollplex.protocol.prefix import Activations, Which
from rollplex_prefix.service import PrefixService
from support.on_device import put_on_device
from support.prefix import STEP, VERSION, World
from support.two_devices import MixedDevices

MakeWorld = Callable[..., World]
ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(("activations", "packed"), [(Activations.KEEP, False), (Activations.RECOMPUTE, True)])
@pytest.mark.parametrize("copies", [1, 3], ids=["shared", "replicated"])
def test_a_whole_step_runs_on_the_device(
    make_world: MakeWorld,
    responses: list[Responses],
    monkeypatch: pytest.MonkeyPatch,
    copies: int,
    activations: Activations,
    packed: bool,
) -> None:
    monkeypatch.setattr("rollplex.model.suffix.packs_suffix", lambda *_, **__: packed)
    devices = put_on_device(monkeypatch, PrefixService)
    world = make_world()
    world.forward(Which.REFERENCE, ALL, 0, copies=copies)
    world.forward(Which.ACTOR, ALL, 1, copies=copies, activations=activations)
    world.score(0, responses, release=True)
    world.unit_views(1).gradients.zero_()
    workspace = LeaseRef(lease=3, kind=Kind.WORKSPACE, size_bytes=2**20)
    before = devices.seen
    world.backward(1, workspace=workspace)
    assert devices.seen > before + 100, "the backward was looked at too"
    world.send(Drain(cause=1, version=VERSION))
    world.send(DigestRequest(cause=1))
    world.send(Committed(cause=1, version=VERSION))


def test_a_tensor_that_is_left_on_the_host_is_found(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a forgotten `device=` in the forward would do."""
    put_on_device(monkeypatch, PrefixService)
    world = make_world()

    def forgetful(model: object, batch: object, **given: object) -> PrefixState:
        state: PrefixState = prefix_forward(model, batch, **given)  # type: ignore[arg-type]
        state.last_hidden *= torch.ones(state.rows, 1)
        return state

    monkeypatch.setattr("rollplex_prefix.service.prefix_forward", forgetful)
    with pytest.raises(MixedDevices, match=r"mul.*device.*host"):
        world.forward(Which.REFERENCE, ALL, 0, step=STEP)
