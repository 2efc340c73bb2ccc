"""Which multiprocessors prefix work is started on, over a driver without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollplex.multiprocessors import Multiprocessors
from rollplex.multiprocessors.green import GreenDriver
from rollplex.protocol.common import Responses
from rollplex.protocol.prefix import Which
from rollplex_prefix import service
from support.green import FakeGreenBinding
from support.prefix import World

WHOLE = tuple(range(132))


def test_a_forward_keeps_to_the_last_multiprocessors_and_what_follows_has_all(
    make_world: Callable[..., World], responses: list[Responses], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, binding, seen = make_world(), FakeGreenBinding(), list[tuple[str, tuple[int, ...]]]()
    loaded: Any = world.service._ready
    loaded.multiprocessors = Multiprocessors(lambda: GreenDriver(0, binding))
    for name in ("prefix_forward", "suffix_forward", "prefix_backward"):
        work = getattr(service, name)

        def noted(*args: Any, name: str = name, work: Callable[..., Any] = work, **kwargs: Any) -> Any:
            seen.append((name, binding.current))
            return work(*args, **kwargs)

        monkeypatch.setattr(service, name, noted)
    world.forward(Which.REFERENCE, (0, 1, 2, 3), 0, share=0.64)
    world.forward(Which.ACTOR, (0, 1), 1, share=0.64)
    world.forward(Which.ACTOR, (2, 3), 2)
    world.score(0, responses, release=True)
    for unit in (1, 2):
        world.unit_views(unit).gradients.zero_()
        world.backward(unit)
    assert seen == [
        ("prefix_forward", WHOLE[48:]),
        ("prefix_forward", WHOLE[48:]),
        ("prefix_forward", WHOLE),
        ("suffix_forward", WHOLE),
        ("prefix_backward", WHOLE),
        ("prefix_backward", WHOLE),
    ]
    assert binding.stack == []


def test_on_a_host_a_share_means_nothing(make_world: Callable[..., World]) -> None:
    world = make_world()
    whole, half = (world.forward(Which.REFERENCE, (0,), unit, share=share) for unit, share in ((0, 1.0), (1, 0.5)))
    assert (whole.held[0].size_bytes, half.unit) == (half.held[0].size_bytes, 1)
