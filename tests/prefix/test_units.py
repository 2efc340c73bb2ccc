"""The life of a prefix unit: used once, in its step, on its version; dropped at once; nothing is left of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from rollplex.errors import StaleWeightsError, StateError
from rollplex.model.prefix import PrefixState
from rollplex.protocol.common import Committed, Drain, Responses
from rollplex.protocol.prefix import Which
from support.prefix import STEP, VERSION, World

MakeWorld = Callable[..., World]
ALL = (0, 1, 2, 3)


def test_scoring_needs_consecutive_groups_of_the_unit(make_world: MakeWorld, responses: list[Responses]) -> None:
    world = make_world()
    world.forward(Which.REFERENCE, (1, 2, 3), 0)
    for groups in ((0,), (1, 3), (2, 1), (3, 0), (1, 2, 3, 0)):
        with pytest.raises(StateError, match=r"not a part of the prefix unit.*needed a part of \(1, 2, 3\)"):
            world.score(0, [responses[group] for group in groups])
    world.score(0, responses[2:])


def test_scoring_needs_a_reference_forward_of_the_same_step(make_world: MakeWorld, responses: list[Responses]) -> None:
    world = make_world()
    world.forward(Which.ACTOR, ALL, 0)
    with pytest.raises(StateError, match="cannot score against reference prefix unit 0"):
        world.score(0, responses)
    world.forward(Which.REFERENCE, ALL, 0)
    with pytest.raises(StateError, match=f"needed its forward in step {STEP + 1}"):
        world.score(0, responses, step=STEP + 1)
    world.score(0, responses)


def test_the_last_suffix_unit_drops_the_reference_keys_and_values(
    make_world: MakeWorld, responses: list[Responses], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("nothing may depend on a collection"))
    world.forward(Which.REFERENCE, ALL, 0)
    state = world.service._units.reference(0, STEP).state
    alive = [weakref.ref(tensor) for tensor in (*state.keys, *state.values, state.last_hidden)]
    del state
    world.score(0, responses[:2])
    assert all(ref() is not None for ref in alive)
    world.score(0, responses[2:], release=True)
    assert all(ref() is None for ref in alive)
    with pytest.raises(StateError, match="cannot score"):
        world.score(0, responses)
    world.send(Drain(cause=1, version=VERSION))


def test_an_allocator_is_trimmed_when_a_units_lease_ends_and_the_unit_is_gone(
    make_world: MakeWorld, responses: list[Responses], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    alive: list[weakref.ref[Tensor]] = []
    trims: list[int] = []
    monkeypatch.setattr(
        "rollplex_prefix.service.trim", lambda _device: trims.append(sum(ref() is not None for ref in alive))
    )
    world.forward(Which.REFERENCE, ALL, 0)
    alive += [weakref.ref(tensor) for tensor in world.service._units.reference(0, STEP).state.keys]
    world.score(0, responses[:2])
    assert trims == []
    world.score(0, responses[2:], release=True)
    assert trims == [0]
    world.forward(Which.ACTOR, ALL, 1)
    world.unit_views(1).gradients.zero_()
    world.backward(1)
    assert trims == [0, 0]
    world.send(Drain(cause=1, version=VERSION))
    assert trims == [0, 0, 0]


def test_the_backward_frees_the_graph_and_unmaps_the_segment_at_once(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("a reference cycle kept the segment alive"))
    world.forward(Which.ACTOR, ALL, 0)
    ref, _ = world.kv[0]
    kept = world.service._units._actor[0].kept
    assert isinstance(kept, PrefixState)
    key = weakref.ref(kept.keys[0])
    del kept
    assert ref.segment in world.segments.attached
    world.unit_views(0).gradients.zero_()
    world.backward(0)
    assert key() is None
    assert ref.segment not in world.segments.attached


def test_a_backward_is_for_a_forward_that_was_not_used_yet_of_the_same_step_and_version(make_world: MakeWorld) -> None:
    world = make_world()
    with pytest.raises(StateError, match="backward of prefix unit 0; got no such forward"):
        world.backward(0)
    world.forward(Which.ACTOR, ALL, 0)
    world.unit_views(0).gradients.zero_()
    world.backward(0)
    with pytest.raises(StateError, match="backward of prefix unit 0; got no such forward"):
        world.backward(0)
    world.forward(Which.ACTOR, ALL, 1)
    with pytest.raises(StateError, match=f"got a forward of step {STEP}, .*needed one of step {STEP + 1}"):
        world.backward(1, step=STEP + 1)
    world.forward(Which.ACTOR, ALL, 2)
    world.publish(VERSION + 1)
    with pytest.raises(StateError, match=f"version {VERSION}; needed one of step {STEP}, version {VERSION + 1}"):
        world.backward(2, version=VERSION + 1)


@pytest.mark.parametrize("which", list(Which))
def test_a_second_forward_of_a_live_unit_is_refused(make_world: MakeWorld, which: Which) -> None:
    world = make_world()
    world.forward(which, ALL, 0)
    with pytest.raises(StateError, match=f"a second {which} forward of prefix unit 0"):
        world.forward(which, ALL, 0)
    world.forward(Which.REFERENCE if which is Which.ACTOR else Which.ACTOR, ALL, 0)


@pytest.mark.parametrize("which", list(Which))
def test_a_unit_that_is_alive_at_the_gate_is_an_error_that_names_it(make_world: MakeWorld, which: Which) -> None:
    world = make_world()
    answer = world.send(Drain(cause=2, version=VERSION))
    assert answer.version == VERSION
    world.send(Committed(cause=3, version=VERSION))
    world.forward(which, ALL, 4)
    with pytest.raises(StateError, match=rf"outlive their step.*{which} units \[4\]"):
        world.send(Drain(cause=3, version=VERSION))


def test_a_drain_of_another_version_than_the_headers_is_refused(make_world: MakeWorld) -> None:
    world = make_world()
    with pytest.raises(StaleWeightsError, match=f"got version {VERSION}, STABLE; needed version {VERSION + 1}"):
        world.send(Drain(cause=2, version=VERSION + 1))


def test_fifty_units_leak_no_descriptor_and_no_mapping(make_world: MakeWorld, responses: list[Responses]) -> None:
    world = make_world()

    def open_files() -> int:
        gc.collect()  # what earlier tests left to be collected must not close files in between
        return sum(1 for _ in Path("/proc/self/fd").iterdir()) - len(world.segments._made)

    before = (open_files(), world.segments.attached)
    for step in range(50):
        world.forward(Which.REFERENCE, (1,), step, step=step)
        world.score(step, responses[1:2], step=step, release=True)
        world.forward(Which.ACTOR, (1,), step, step=step)
        world.unit_views(step).gradients.zero_()
        world.backward(step, step=step)
        world.send(Committed(cause=1, version=VERSION))
    assert (open_files(), world.segments.attached) == before
