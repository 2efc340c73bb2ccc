"""A unit's pictures in the scheduler process: what the tower is given, what is made ahead, and that nothing is kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rollplex.errors import SegmentError, StateError, WaitError
from rollplex.memory.tensors import tensor
from rollplex_rollout.sglang import pixels as module
from rollplex_rollout.sglang.pixels import Pixels, Place

if TYPE_CHECKING:
    from rollout.conftest import Node


@pytest.fixture
def pixels(shared_node: Node) -> Iterator[Pixels]:
    made = made_for(shared_node)
    made.open(shared_node.segments.map_again(shared_node.inputs_ref))
    yield made
    made.close()


def made_for(node: Node, dtype: torch.dtype = torch.bfloat16) -> Pixels:
    return Pixels(row_width=node.shape.row_width, dtype=dtype, device=torch.device("cpu"))


def places(node: Node) -> list[Place]:
    """Of all pictures, in order: one, two, and a film, all as if they were images."""
    return [Place(medium.offset, medium.rows, video=False) for slot in node.slots for medium in slot.media]


def stored(node: Node, place: Place) -> torch.Tensor:
    return tensor(node.inputs, place.offset, (place.rows, node.shape.row_width), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("expected", [True, False])
def test_rows_are_the_segments_as_the_tower_rounds_them(
    shared_node: Node, dtype: torch.dtype, *, expected: bool
) -> None:
    made = made_for(shared_node, dtype)
    made.open(shared_node.segments.map_again(shared_node.inputs_ref))
    for place in places(shared_node):
        if expected:
            made.expect(place)
        assert torch.equal(made.take(place), stored(shared_node, place).to(dtype))
    made.close()


def test_what_is_expected_is_made_before_it_is_wanted_and_once(
    shared_node: Node, pixels: Pixels, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = watch(pixels, monkeypatch)
    for place in places(shared_node):
        pixels.expect(place)
    done, _ = wait(pixels._made.values(), 10.0)
    assert len(done) == len(made) == len(places(shared_node))
    for place in places(shared_node):
        pixels.take(place)
    assert made == places(shared_node)
    pixels.take(places(shared_node)[0])  # again, as a prompt that has lost its place: made at once
    assert made == [*places(shared_node), places(shared_node)[0]]


def test_only_so_much_is_made_ahead(shared_node: Node, pixels: Pixels, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third, fourth = places(shared_node)
    width = shared_node.shape.row_width * 2
    monkeypatch.setattr(module, "AHEAD_BYTES", (first.rows + second.rows) * width)
    for place in places(shared_node):
        pixels.expect(place)
    assert list(pixels._made) == [first, second]
    pixels.take(first)
    assert list(pixels._made) == [second, third]
    pixels.take(second)
    pixels.take(third)
    assert list(pixels._made) == [fourth]


def test_what_others_gave_already_does_not_stand_in_the_way(shared_node: Node, pixels: Pixels) -> None:
    """A picture that SGLang finds encoded is not taken."""
    first, second, third, *_ = places(shared_node)
    for place in (first, first, second, third):
        pixels.expect(place)
    assert torch.equal(pixels.take(third), stored(shared_node, third).to(torch.bfloat16))
    assert not any(pixels._expected.values())
    assert not pixels._made


def test_images_are_taken_before_videos_that_were_expected_before_them(
    shared_node: Node, pixels: Pixels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SGLang does in each prefill step."""
    first, second, third, fourth = places(shared_node)
    film, other = (place._replace(video=True) for place in (first, third))
    monkeypatch.setattr(module, "AHEAD_BYTES", 1)
    made = watch(pixels, monkeypatch)
    for place in (film, second, other, fourth):
        pixels.expect(place)
    assert list(pixels._made) == [film, second], "so much of each kind"
    for place in (second, fourth, film, other):
        assert torch.equal(pixels.take(place), stored(shared_node, place).to(torch.bfloat16))
    assert sorted(made) == sorted([film, second, other, fourth]), "once each"
    for place in (film, second, other):
        pixels.expect(place)
    pixels.take(other)
    assert list(pixels._made) == [second], "of videos only those before it are not wanted any more"


def test_one_picture_that_is_larger_than_all_that_may_be_made_ahead_is_made_too(
    shared_node: Node, pixels: Pixels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AHEAD_BYTES", 1)
    made = watch(pixels, monkeypatch)
    first, second, *_ = places(shared_node)
    pixels.expect(first)
    pixels.expect(second)
    assert list(pixels._made) == [first]
    pixels.take(first)
    pixels.take(second)
    assert made == [first, second]


def test_a_request_may_come_before_its_inputs(shared_node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_for(shared_node)
    place = places(shared_node)[0]
    made.expect(place)
    later = threading.Timer(0.05, lambda: made.open(shared_node.segments.map_again(shared_node.inputs_ref)))
    later.start()
    assert torch.equal(made.take(place), stored(shared_node, place).to(torch.bfloat16))
    later.join()
    made.close()
    monkeypatch.setattr(module, "OPEN_DEADLINE_S", 0.01)
    with pytest.raises(WaitError, match="have not come"):
        made.take(place)
    made.expect(place)
    with pytest.raises(WaitError, match="have not come"):
        made.take(place)
    made.close()


def test_the_end_of_a_unit_does_not_wait_for_inputs_that_never_came(
    shared_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = made_for(shared_node)
    waits = threading.Event()
    wait_for = made._changed.wait_for

    def watched(*args: Any) -> bool:
        waits.set()
        return bool(wait_for(*args))

    monkeypatch.setattr(made._changed, "wait_for", watched)
    first, second, *_ = places(shared_node)
    made.expect(first)
    made.expect(second)
    rows = made._made[first]
    assert waits.wait(10.0)
    closes = threading.Thread(target=made.close)
    closes.start()
    closes.join(10.0)
    assert not closes.is_alive()
    with pytest.raises(StateError, match="of a unit that is over"):
        rows.result(0.0)
    made.open(shared_node.segments.map_again(shared_node.inputs_ref))
    made.expect(first)
    assert torch.equal(made.take(first), stored(shared_node, first).to(torch.bfloat16)), "the next unit's"
    made.close()


def test_a_place_outside_the_segment_is_an_error_of_whoever_takes_it(shared_node: Node, pixels: Pixels) -> None:
    outside = Place(shared_node.inputs.size_bytes - 4, 4, video=False)
    pixels.expect(outside)
    with pytest.raises(SegmentError):
        pixels.take(outside)


def test_the_segment_is_let_go_with_what_was_expected(shared_node: Node) -> None:
    made, mapping = made_for(shared_node), shared_node.segments.map_again(shared_node.inputs_ref)
    before = threading.active_count()
    made.close()  # where there is none
    made.open(mapping)
    with pytest.raises(StateError, match="while another's are in use"):
        made.open(shared_node.segments.map_again(shared_node.inputs_ref))
    for place in places(shared_node):
        made.expect(place)
    kept = made.take(places(shared_node)[1])
    made.close()
    assert mapping.closed
    assert threading.active_count() == before
    assert torch.equal(kept, stored(shared_node, places(shared_node)[1]).to(torch.bfloat16))
    made.open(shared_node.segments.map_again(shared_node.inputs_ref))
    made.close()


def watch(pixels: Pixels, monkeypatch: pytest.MonkeyPatch) -> list[Place]:
    """The rows that are made, as they are."""
    made: list[Place] = []
    rows = pixels._rows

    def watched(place: Place) -> torch.Tensor:
        made.append(place)
        return rows(place)

    monkeypatch.setattr(pixels, "_rows", watched)
    return made
