"""Where responses stop and when groups are finished, without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollplex.errors import EngineError
from rollplex.memory.segment import backend
from rollplex.protocol.common import PromptSlot
from rollplex.protocol.rollout import Sampling
from rollplex_rollout.engine import FinishedGroup, Unit
from rollplex_rollout.transcript import Transcript


def unit_of(groups: tuple[int, ...], **sampling: Any) -> Unit:
    values: dict[str, Any] = {"seed": 0, "purpose": "train", "group_size": 2, "max_new_tokens": 4, "temperature": 1.0}
    host = backend("host")
    return Unit(
        step=0,
        prompts=tuple(
            PromptSlot(group=g, row=g, tokens=1, ids_offset=0, positions_offset=0, next_position=1) for g in groups
        ),
        sampling=Sampling(**{**values, **sampling}),
        inputs=host.map(host.create(64, "inputs"), 64),
    )


def play(transcript: Transcript, *columns: tuple[int, ...]) -> list[list[FinishedGroup]]:
    """Feed columns of tokens; the log-probability of a token is -token - position / 100."""
    return [
        list(transcript.add(np.asarray(column), -np.asarray(column, dtype=np.float64) - transcript.position / 100))
        for column in columns
    ]


def test_a_group_is_finished_at_the_token_at_which_its_last_sample_stops() -> None:
    transcript = Transcript(unit_of((4, 9), stop_ids=(7,)))
    first, second, third = play(transcript, (1, 7, 2, 2), (7, 5, 2, 7), (6, 6, 7, 6))
    assert first == []
    assert [group.group for group in second] == [4]
    assert [group.group for group in third] == [9]
    assert second[0].lengths == (2, 1)
    assert second[0].tokens.tolist() == [1, 7, 7]
    assert second[0].logprobs.tolist() == [-1.0, -7.01, -7.0]
    assert third[0].tokens.tolist() == [2, 2, 7, 2, 7]
    assert transcript.done


def test_groups_that_stop_together_come_in_the_order_of_the_prompts() -> None:
    (only,) = play(Transcript(unit_of((9, 4, 6), stop_ids=(7,))), (7, 7, 7, 7, 7, 7))
    assert [group.group for group in only] == [9, 4, 6]


def test_a_response_that_meets_no_stop_id_ends_at_the_limit_and_is_not_stopped() -> None:
    columns = play(Transcript(unit_of((0,), stop_ids=(7, 8))), (1, 1), (8, 1), (1, 1), (1, 8))
    assert columns[:3] == [[], [], []]
    assert columns[3][0].lengths == (2, 4)
    assert columns[3][0].stopped == (True, True)
    columns = play(Transcript(unit_of((0,))), (7, 1), (8, 1), (1, 1), (1, 8))
    assert columns[3][0].stopped == (False, False)


ENDS: dict[str, tuple[dict[str, Any], list[tuple[int, int]], tuple[int, int], tuple[bool, bool], list[int]]] = {
    # sampling, tokens of the two samples at each position, lengths, stopped, tokens
    "an end at once, which decodes to nothing": ({"stop_ids": (7,)}, [(7, 7)], (1, 1), (True, True), [7, 7]),
    "an end as the only allowed token": (
        {"stop_ids": (7,), "max_new_tokens": 1}, [(7, 5)], (1, 1), (True, False), [7, 5],
    ),
    "an end as the last allowed token": (
        {"stop_ids": (7,)}, [(1, 1), (2, 2), (3, 3), (7, 4)], (4, 4), (True, False), [1, 2, 3, 7, 1, 2, 3, 4],
    ),
    "an end just before the last allowed token": (
        {"stop_ids": (7,)}, [(1, 1), (2, 2), (7, 3), (7, 7)], (3, 4), (True, True), [1, 2, 7, 1, 2, 3, 7],
    ),
    "two ids that end, each alone": ({"stop_ids": (7, 0)}, [(7, 0)], (1, 1), (True, True), [7, 0]),
    "two ids that end, and what comes after the first": (
        {"stop_ids": (7, 8)}, [(1, 8), (8, 7), (7, 7)], (2, 1), (True, True), [1, 8, 8],
    ),
    "no id that ends": ({"max_new_tokens": 2}, [(7, 7), (7, 7)], (2, 2), (False, False), [7, 7, 7, 7]),
}  # fmt: skip


@pytest.mark.parametrize("what", ENDS)
def test_where_a_response_ends_and_whether_it_stopped(what: str) -> None:
    sampling, columns, lengths, stopped, tokens = ENDS[what]
    transcript = Transcript(unit_of((3,), **sampling))
    finished = [group for column in columns if not transcript.done for group in play(transcript, column)[0]]
    (group,) = finished
    assert transcript.done
    assert (group.lengths, group.stopped) == (lengths, stopped)
    assert group.tokens.tolist() == tokens
    assert len(group.logprobs) == len(tokens)


def test_forced_lengths_alone_decide_and_follow_group_and_sample() -> None:
    transcript = Transcript(unit_of((1, 3), stop_ids=(7,), forced_lengths=(3, 1, 2)))
    columns = play(transcript, (7, 7, 7, 7), (7, 7, 7, 7), (7, 7, 7, 7))
    finished = {group.group: group for column in columns for group in column}
    assert finished[1].lengths == (2, 3)  # (1 * 2 + 0) % 3 = 2, (1 * 2 + 1) % 3 = 0
    assert finished[3].lengths == (3, 1)
    assert finished[1].stopped == (True, True)  # the last token is a stop id


def test_no_token_is_taken_after_the_last_response_stopped() -> None:
    transcript = Transcript(unit_of((0,), max_new_tokens=1))
    play(transcript, (1, 1))
    with pytest.raises(EngineError, match="position 1"):
        play(transcript, (1, 1))


@pytest.mark.parametrize(
    ("groups", "sampling", "message"),
    [
        ((), {}, "no prompts"),
        ((1, 1), {}, "names a group twice"),
        ((1,), {"group_size": 0}, "without samples"),
        ((1,), {"max_new_tokens": 0}, "without tokens"),
        ((1,), {"forced_lengths": (5,)}, "cannot be reached; got 5 .. 5; needed 1 .. max_new_tokens = 4"),
        ((1,), {"forced_lengths": (0, 2)}, "cannot be reached"),
    ],
)
def test_units_that_cannot_be_sampled_are_refused(
    groups: tuple[int, ...], sampling: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        unit_of(groups, **sampling).check()
