"""Which services may be replaced, and the states of a replacement."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rollplex.errors import StateError
from rollplex.protocol.common import Role
from rollplex_coordinator.decisions.swap import TAKEOVER, Stage, Surroundings, Swaps

HOST = Surroundings(single=True, external_workers=False, gpu=False, pools=False, remote=False)
SERVE = ("serve", "--fast")


def test_a_newcomer_that_conforms_waits_for_a_border_and_then_has_the_place() -> None:
    assert (Swaps(HOST).newest, Swaps(HOST).due) == (None, None)
    swaps = Swaps(HOST)
    assert swaps.ask(Role.ROLLOUT, SERVE, stopping=False).stage is Stage.TESTING
    assert [swaps.due] == [None]
    waiting = swaps.passed()
    assert [swaps.due] == [waiting]
    done = swaps.swapped(3)
    assert (done.stage, done.step, done.command) == (Stage.SWAPPED, 3, SERVE)
    assert [swaps.due] == [None]
    assert swaps.newest == done


@pytest.mark.parametrize("passed", [False, True])
def test_a_newcomer_can_be_refused_by_its_test_and_at_the_border(*, passed: bool) -> None:
    swaps = Swaps(HOST)
    swaps.ask(Role.PREFIX, SERVE, stopping=False)
    if passed:
        swaps.passed()
    refused = swaps.refused(TAKEOVER, "exit code 1", "a service that stays")
    assert (refused.stage, refused.case, refused.got) == (Stage.REFUSED, TAKEOVER, "exit code 1")
    assert swaps.due is None
    assert swaps.ask(Role.ROLLOUT, SERVE, stopping=False).stage is Stage.TESTING, "another one may follow"


@pytest.mark.parametrize(
    ("role", "around", "needed"),
    [
        (Role.INPUT, HOST, "rollout, prefix or trainer"),
        (Role.TRAINER, replace(HOST, single=False), "one device"),
        (Role.ROLLOUT, replace(HOST, single=False), "one device"),
        (Role.ROLLOUT, replace(HOST, external_workers=True), "workers that this coordinator starts"),
        (Role.PREFIX, replace(HOST, gpu=True), "host memory"),
        (Role.ROLLOUT, replace(HOST, pools=True), "an engine without a pool"),
        (Role.ROLLOUT, replace(HOST, remote=True), "a control API on loopback"),
    ],
)
def test_what_cannot_be_replaced_is_refused_by_name(role: Role, around: Surroundings, needed: str) -> None:
    swaps = Swaps(around)
    with pytest.raises(StateError, match=needed) as caught:
        swaps.ask(role, SERVE, stopping=False)
    assert f"a replacement of {role} by serve --fast" in str(caught.value)
    assert swaps.newest is None


def test_one_replacement_is_under_way_at_a_time_and_none_while_the_run_stops() -> None:
    swaps = Swaps(HOST)
    with pytest.raises(StateError, match="a run that goes on"):
        swaps.ask(Role.ROLLOUT, SERVE, stopping=True)
    with pytest.raises(StateError, match="a program"):
        swaps.ask(Role.ROLLOUT, (), stopping=False)
    swaps.ask(Role.ROLLOUT, SERVE, stopping=False)
    with pytest.raises(StateError, match="no other replacement"):
        swaps.ask(Role.PREFIX, SERVE, stopping=False)
    assert Swaps(replace(HOST, pools=True)).ask(Role.PREFIX, SERVE, stopping=False).role is Role.PREFIX
