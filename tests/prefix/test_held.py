"""What a prefix process says it holds, and how often its vision tower runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollplex.memory.predict import kv_bytes, logits_bytes, prefix_activation_bytes, scored_rows
from rollplex.protocol.common import Responses
from rollplex.protocol.prefix import Which
from support.prefix import STEP, WORKSPACE, World

MakeWorld = Callable[..., World]
ALL = (0, 1, 2, 3)


@pytest.mark.parametrize("copies", [1, 3], ids=["shared", "replicated"])
@pytest.mark.parametrize("freeze_vision", [False, True], ids=["vision trained", "vision frozen"])
@pytest.mark.parametrize("groups", [ALL, (1,), (0, 1)], ids=str)
def test_held_bytes_are_within_five_per_cent_of_what_shapes_predict(
    make_world: MakeWorld, responses: list[Responses], copies: int, freeze_vision: bool, groups: tuple[int, ...]
) -> None:
    world = make_world(freeze_vision=freeze_vision)
    slots = [world.slots[group] for group in groups]
    rows, tokens = len(slots) * copies, max(slot.tokens for slot in slots)
    (held,) = world.forward(Which.ACTOR, groups, 0, copies=copies).held
    grids = [(m.frames, m.height, m.width) for slot in slots for _ in range(copies) for m in slot.media]
    predicted = prefix_activation_bytes(
        world.shape, rows=rows, tokens=tokens, grids=grids, freeze_vision=freeze_vision, dtype=world.dtype
    )
    assert held.lease == 20
    assert held.size_bytes == pytest.approx(predicted, rel=0.05)
    (held,) = world.forward(Which.REFERENCE, groups, 1, copies=copies).held
    assert held.lease == 21
    assert held.size_bytes == kv_bytes(world.shape, rows=rows, tokens=tokens, dtype=world.dtype)
    some = [responses[group] for group in groups]
    (held,) = world.score(1, some).held
    lengths = [length for response in some for length in response.lengths]
    scratch = logits_bytes(world.shape, rows=scored_rows(rows, lengths), dtype=world.dtype)
    assert held.lease == WORKSPACE.lease
    assert held.size_bytes == pytest.approx(scratch, rel=0.05)


@pytest.mark.parametrize("copies", [1, 3], ids=["shared", "replicated"])
@pytest.mark.parametrize("which", list(Which))
def test_the_vision_tower_sees_each_row_with_media_once_and_the_answer_says_so(
    make_world: MakeWorld, which: Which, copies: int
) -> None:
    world = make_world()
    ready = world.service._ready
    model: Any = ready.actor if which is Which.ACTOR else ready.reference
    seen: list[int] = []
    model.model.visual.patch_embed.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    answer = world.forward(which, ALL, 4, copies=copies)
    assert (answer.step, answer.unit, answer.which) == (STEP, 4, which)
    assert answer.start_s <= answer.end_s
    assert answer.vision_prompts == 3 * copies
    assert seen == [sum(slot.media_rows for slot in world.slots) * copies]
    assert world.forward(which, (1,), 5, copies=copies).vision_prompts == 0
    assert len(seen) == 1
