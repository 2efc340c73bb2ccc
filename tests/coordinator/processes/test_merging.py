"""One answer of several processes: what is taken together, and what may not differ."""

from __future__ import annotations

import math

import pytest

from rollplex.errors import StateError
from rollplex.protocol.common import Device, Held, Loaded, Logprobs, Parallel, Responses, Role
from rollplex.protocol.rollout import GroupFinished, Prefilled
from rollplex.protocol.trainer import SuffixTrained, UpdateSkipped, UpdateVote
from rollplex_coordinator.decisions.fleet import Team
from rollplex_coordinator.processes.merging import Instruction, merge

TEAM = Team(
    role=Role.TRAINER,
    index=1,
    devices=(Device(index=2), Device(index=3)),
    parallels=(Parallel(training=2), Parallel(training=2, rank=1)),
)


def trained(cause: int, start_s: float, end_s: float, value: float = -1.0) -> SuffixTrained:
    return SuffixTrained(
        cause=cause,
        step=3,
        suffix_unit=0,
        start_s=start_s,
        end_s=end_s,
        held=(Held(lease=cause, size_bytes=10 * cause),),
        logprobs=(Logprobs(group=0, values=value.hex().encode()),),
    )


def vote(metrics: dict[str, float], *, finite: bool = True, cause: int = 1) -> UpdateVote:
    return UpdateVote(cause=cause, step=0, finite=finite, start_s=0.0, end_s=1.0, metrics=metrics)


def finished(cause: int, group: int, tokens: bytes = b"\0" * 4) -> GroupFinished:
    return GroupFinished(
        cause=cause,
        step=0,
        version_start=0,
        version_end=0,
        responses=Responses(group=group, lengths=(1,), tokens=tokens),
        logprobs=Logprobs(group=group, values=b"\0" * 8),
        stopped=(True,),
        end_s=float(cause),
    )


def test_a_merged_answer_is_the_leader_s_over_the_time_of_all_and_with_what_all_held() -> None:
    merged = merge(TEAM, [trained(7, 2.0, 5.0), trained(8, 1.0, 4.0)])
    assert (merged.cause, merged.start_s, merged.end_s, merged.step) == (7, 1.0, 5.0, 3)
    assert [held.size_bytes for held in merged.held] == [70, 80]


def test_one_bit_of_difference_is_an_error_that_names_field_devices_and_both_values() -> None:
    with pytest.raises(StateError, match=r"trainer\[0:2, 0:3\].*different results") as caught:
        merge(TEAM, [trained(7, 1.0, 2.0), trained(8, 1.0, 2.0, math.nextafter(-1.0, 0.0))])
    text = str(caught.value)
    assert "SuffixTrained.logprobs" in text
    assert "from device 0:3" in text
    assert (-1.0).hex() in text
    assert math.nextafter(-1.0, 0.0).hex() in text


def test_a_metric_that_is_no_number_everywhere_is_no_difference_and_a_vote_that_differs_is_one() -> None:
    loss = {"loss": math.nan, "norm": 0.0}
    assert merge(TEAM, [vote(loss), vote(dict(reversed(loss.items())))]).finite
    with pytest.raises(StateError, match="finite: False from device 0:3; needed True"):
        merge(TEAM, [vote(loss), vote(loss, finite=False)])
    with pytest.raises(StateError, match=r"UpdateVote\.metrics"):
        merge(TEAM, [vote({"norm": 0.0}), vote({"norm": -0.0})])


def test_answers_of_two_types_are_told_apart() -> None:
    with pytest.raises(StateError, match="type of the answer: UpdateSkipped.*UpdateVote"):
        merge(TEAM, [vote({}), UpdateSkipped(cause=2, step=0)])


def test_a_team_has_answered_when_all_have_and_each_is_heard_at_once() -> None:
    heard: list[int] = []
    told = Instruction(TEAM, heard.append)
    assert told.answered(1, trained(8, 1.0, 4.0)) == []
    assert heard == [1]
    (merged,) = told.answered(0, trained(7, 2.0, 5.0))
    assert (merged.cause, heard) == (7, [1, 0])


def test_each_piece_is_passed_on_when_all_have_sent_it() -> None:
    told = Instruction(TEAM)
    assert told.piece(0, finished(1, group=4)) == []
    assert told.piece(0, Prefilled(cause=1, step=0, unit=0, end_s=1.0)) == []
    assert told.piece(0, finished(1, group=5)) == []
    assert [m.responses.group for m in told.piece(1, finished(2, group=5))] == [5]
    (prefilled,) = told.piece(1, Prefilled(cause=2, step=0, unit=0, end_s=3.0))
    assert prefilled.end_s == 3.0
    with pytest.raises(StateError, match=r"GroupFinished\.responses"):
        told.piece(1, finished(2, group=4, tokens=b"\1\0\0\0"))


def test_answers_about_a_device_are_passed_on_one_by_one() -> None:
    told = Instruction(TEAM)
    for rank in (1, 0):
        answer = Loaded(cause=rank, table_bytes=100 + rank)
        assert told.answered(rank, answer) == [answer]
