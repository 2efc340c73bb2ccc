"""No wait without an end."""

from __future__ import annotations

import pytest

from rollplex.errors import StateError, WaitError
from rollplex_coordinator.decisions.waits import Waits


def one(waits: Waits, now_s: float = 0.0) -> None:
    waits.add(cause=1, what="prefix of groups 0-3", peer="prefix[0:0]", now_s=now_s, ack_s=2.0, section_s=10.0)


def test_an_instruction_that_is_not_acknowledged_is_named() -> None:
    waits = Waits()
    one(waits)
    waits.check(1.9)
    assert waits.next_deadline() == 2.0
    with pytest.raises(WaitError, match=r"prefix\[0:0\] did not receive an instruction: prefix of groups 0-3"):
        waits.check(2.0)


def test_a_section_without_progress_is_named_with_its_age() -> None:
    waits = Waits()
    one(waits)
    waits.received(1, "prefix[0:0]")
    waits.check(9.9)
    with pytest.raises(WaitError, match="did not finish: prefix of groups 0-3.*no progress for 10.0 s"):
        waits.check(10.0)


def test_progress_starts_the_section_anew_and_a_standing_counter_does_not() -> None:
    waits = Waits()
    one(waits)
    waits.received(1, "prefix[0:0]")
    waits.progressed("prefix[0:0]", 1, 5.0)
    waits.progressed("prefix[0:0]", 1, 9.0)
    waits.check(14.9)
    with pytest.raises(WaitError):
        waits.check(15.0)


def test_an_answer_ends_a_wait_once_and_only_from_its_peer() -> None:
    waits = Waits()
    one(waits)
    with pytest.raises(StateError, match="nobody waits for"):
        waits.answered(1, "rollout[0:0]")
    assert waits.answered(1, "prefix[0:0]").what == "prefix of groups 0-3"
    with pytest.raises(StateError, match="nobody waits for"):
        waits.answered(1, "prefix[0:0]")
    assert waits.next_deadline() is None


def test_what_a_dead_peer_owed_is_dropped_and_told() -> None:
    waits = Waits()
    one(waits)
    assert [wait.what for wait in waits.drop_peer("prefix[0:0]")] == ["prefix of groups 0-3"]
    waits.check(1000.0)


def test_of_those_that_work_together_the_one_that_is_silent_is_named() -> None:
    waits = Waits()
    for cause, peer, what in ((1, "prefix[0:0]", "a unit"), (2, "prefix[0:1]", "a unit"), (3, "prefix[0:2]", "other")):
        waits.add(cause=cause, what=what, peer=peer, now_s=0.0, ack_s=None, section_s=10.0)
    waits.progressed("prefix[0:1]", 1, 0.5)
    with pytest.raises(WaitError, match=r"prefix\[0:1\] did not finish: a unit.*and no sign of life; needed"):
        waits.check(10.0, silent=["prefix[0:2]", "prefix[0:1]"])
    with pytest.raises(WaitError, match=r"prefix\[0:0\] did not finish: a unit; got no progress for 10.0 s, 10.0 s"):
        waits.check(10.0, silent=["prefix[0:2]"])
