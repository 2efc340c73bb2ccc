"""From prompts in the inputs segment to what SGLang is asked for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec.structs import replace

from rollplex.errors import EngineError
from rollplex.memory.tensors import tensor
from rollplex_rollout.engine import Unit
from rollplex_rollout.sglang.hooks import PICTURED, prompt_of
from rollplex_rollout.sglang.requests import Medium, Pictures, Requests, sampling_parameters
from support.tiny import FILM, IMAGE, PICTURE, PICTURES

if TYPE_CHECKING:
    from rollout.conftest import Node

WORDS_GROUP, PICTURE_GROUP, PICTURES_GROUP, FILM_GROUP = 1, 0, 2, 3


def requests_of(node: Node, context: int = 64) -> Requests:
    return Requests(node.shape, context_tokens=context)


def only(node: Node, group: int) -> Pictures | None:
    """Those of the first request of a unit of one group."""
    (made,) = requests_of(node).make(node.unit((group,)), "t")
    return made[0].pictures() if made[0].pictures is not None else None


def test_a_request_per_response_with_ids_that_are_no_beginnings_of_each_other(shared_node: Node) -> None:
    made = requests_of(shared_node).make(shared_node.unit((2, 1), group_size=3), "u7")
    rids = [request.rid for group in made for request in group]
    assert len(set(rids)) == 6
    assert not any(a != b and b.startswith(a) for a in rids for b in rids)
    assert made[1][0].input_ids == shared_node.prompts[1].ids.tolist()
    first, *others = made[0]
    assert first.pictures is not None
    assert all(request.pictures is None for request in others), "pictures are sent once a prompt"
    assert {prompt_of(request.rid) for request in made[0]} == {f"u7{PICTURED}-000000"}
    assert {prompt_of(request.rid) for request in made[1]} == {"u7-000001"}, "a prompt without pictures"


def test_pictures_are_told_by_their_places_with_the_prompts_own_positions(shared_node: Node) -> None:
    prompt = shared_node.prompts[PICTURES_GROUP]
    pictures = only(shared_node, PICTURES_GROUP)
    assert pictures is not None
    assert torch.equal(pictures.positions, prompt.positions)
    assert pictures.position_delta == prompt.slot.next_position - prompt.slot.tokens
    assert [medium.frames for medium in pictures.media] == [(grid,) for grid in PICTURES[1]]
    for medium, slot in zip(pictures.media, shared_node.slots[PICTURES_GROUP].media, strict=True):
        assert not medium.video
        assert (medium.offset, medium.rows) == (slot.offset, slot.rows)
        run = range(medium.first, medium.last + 1)
        assert len(run) * 4 == medium.rows
        assert all(prompt.ids[place] == IMAGE for place in run)
        assert prompt.ids[medium.first - 1] != IMAGE
        assert prompt.ids[medium.last + 1] != IMAGE


def test_a_picture_is_named_by_its_pixels(node: Node) -> None:
    (slot,) = node.slots[PICTURE_GROUP].media
    names = [medium.name for group in (PICTURE_GROUP, PICTURES_GROUP) for medium in media_of(node, group)]
    assert len(set(names)) == 3
    assert all(0 <= name < 2**63 for name in names)
    last = slot.offset + slot.rows * node.shape.row_width * 4 - 4
    pixel = node.inputs.read(last, 4)
    node.inputs.write(last, b"\x01\x02\x03\x04")
    assert media_of(node, PICTURE_GROUP)[0].name != names[0]
    node.inputs.write(last, pixel)
    assert media_of(node, PICTURE_GROUP)[0].name == names[0]


def test_the_same_pixels_have_another_name_where_anything_else_differs(node: Node) -> None:
    """SGLang would take the one's embedding, and with the same text before it its keys and values, for the other's."""
    slot = node.slots[FILM_GROUP]
    (film,) = slot.media
    frames, height, width = film.frames, film.height, film.width
    assert height != width

    def name(ids: list[int], **grid: int) -> int:
        unit = changed(node, FILM_GROUP, media=(replace(film, **grid),))
        node.inputs.write(slot.ids_offset, torch.tensor(ids).numpy().tobytes())
        (made,) = requests_of(node).make(unit, "t")
        assert made[0].pictures is not None
        (medium,) = made[0].pictures().media
        return medium.name

    ids = node.prompts[FILM_GROUP].ids.tolist()
    as_image = [IMAGE if token == node.shape.video_id else token for token in ids]
    first = name(ids)
    names = [
        first,
        name(as_image),
        name(ids, frames=1, height=frames * height),
        name(ids, height=width, width=height),
    ]
    run = ids.index(node.shape.video_id)
    positions = tensor(node.inputs, slot.positions_offset, (3, slot.tokens), torch.int64)
    positions += 7
    assert name(ids) == first, "after other text it is the same picture"
    positions[0, run + 1 :] += 1
    names.append(name(ids))  # a film at another rate
    assert len(set(names)) == len(names)


def media_of(node: Node, group: int) -> tuple[Medium, ...]:
    pictures = only(node, group)
    assert pictures is not None
    return pictures.media


def test_a_video_is_told_from_an_image_by_its_placeholders(shared_node: Node) -> None:
    (medium,) = media_of(shared_node, FILM_GROUP)
    ((frames, height, width),) = FILM[1]
    assert medium.video
    assert medium.frames == ((1, height, width),) * frames, "SGLang must not mix a video's frames"


def test_nothing_holds_the_segment_after_pictures_are_read(node: Node) -> None:
    other = node.segments.map_again(node.inputs_ref)
    unit = dataclasses.replace(node.unit((PICTURES_GROUP,)), inputs=other)
    (made,) = requests_of(node).make(unit, "t")
    assert made[0].pictures is not None
    kept = made[0].pictures()
    other.close()
    assert kept.media[0].rows == 4


def test_words_have_no_media(shared_node: Node) -> None:
    assert only(shared_node, WORDS_GROUP) is None


@pytest.mark.parametrize(
    ("forced", "expected"),
    [((), {"ignore_eos": False, "stop_token_ids": [4, 5]}), ((2, 8), {"ignore_eos": True, "stop_token_ids": None})],
)
def test_forced_lengths_look_at_no_stop_id(
    shared_node: Node, forced: tuple[int, ...], expected: dict[str, Any]
) -> None:
    sampling = shared_node.sampling(forced_lengths=forced, stop_ids=(4, 5), top_k=0, temperature=0.5, top_p=0.9)
    made = sampling_parameters(sampling, 8)
    assert expected.items() <= made.items()
    assert made["max_new_tokens"] == 8
    assert made["top_k"] == -1
    assert (made["temperature"], made["top_p"]) == (0.5, 0.9)


def test_each_response_has_its_own_forced_length(shared_node: Node) -> None:
    made = requests_of(shared_node).make(shared_node.unit((0, 1), group_size=2, forced_lengths=(1, 2, 3)), "t")
    assert [[request.limit for request in group] for group in made] == [[1, 2], [3, 1]]
    assert made[1][0].sampling["max_new_tokens"] == 3


def test_a_prompt_that_is_too_long_with_its_response_is_refused_before_sglang_shortens_it(shared_node: Node) -> None:
    tokens = shared_node.slots[PICTURE_GROUP].tokens
    unit = shared_node.unit((PICTURE_GROUP,), max_new_tokens=8)
    requests_of(shared_node, context=tokens + 8).make(unit, "t")
    with pytest.raises(EngineError, match="longer than the engine was started for") as caught:
        requests_of(shared_node, context=tokens + 7).make(unit, "t")
    assert caught.value.where == "group 0, row 100"


def changed(node: Node, group: int, **changes: Any) -> Unit:
    unit = node.unit((group,))
    return Unit(
        step=unit.step, prompts=(replace(node.slots[group], **changes),), sampling=unit.sampling, inputs=unit.inputs
    )


@pytest.mark.parametrize(
    ("group", "changes", "what"),
    [
        (PICTURE_GROUP, {"media": ()}, "placeholders but no media"),
        (PICTURES_GROUP, {"media": "first"}, "not those of its media"),
        (WORDS_GROUP, {"media": "picture"}, "not those of its media"),
        (WORDS_GROUP, {"next_position": 9}, "other positions"),
        (WORDS_GROUP, {"tokens": 0}, "longer than the engine"),
    ],
)
def test_what_sglang_would_wait_for_without_end_is_refused(
    shared_node: Node, group: int, changes: dict[str, Any], what: str
) -> None:
    named = {"first": shared_node.slots[PICTURES_GROUP].media[:1], "picture": shared_node.slots[PICTURE_GROUP].media}
    if "media" in changes:
        changes = {"media": named.get(changes["media"], changes["media"])}
    with pytest.raises(EngineError, match=what):
        requests_of(shared_node).make(changed(shared_node, group, **changes), "t")


def test_an_id_outside_the_vocabulary_is_named(node: Node) -> None:
    slot = node.slots[WORDS_GROUP]
    node.inputs.write(slot.ids_offset, (10**6).to_bytes(8, "little"))
    with pytest.raises(EngineError, match="1000000"):
        requests_of(node).make(node.unit((WORDS_GROUP,)), "t")


def test_the_placeholder_of_these_prompts_is_what_the_model_says(shared_node: Node) -> None:
    assert shared_node.shape.image_id == IMAGE
    assert IMAGE in PICTURE[0]
