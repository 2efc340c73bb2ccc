"""A live run whose services are replaced, and newcomers that may not take a place. Two nodes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollplex.journal.events import ServiceSwapped, SwapRefused
from rollplex.programs import own
from support.nodes import Finished, Node, Start

ITERATIONS = 8
OTHER = [sys.executable, "-m", "rollplex_rollout", "--connect-deadline-s", "60"]
"""The same implementation under another command."""
OTHER_PREFIX = [sys.executable, "-m", "rollplex_prefix", "--connect-deadline-s", "60"]
OTHER_TRAINER = [sys.executable, "-m", "rollplex_trainer", "--connect-deadline-s", "60"]
BACK = own("rollplex_rollout")
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
QUICK = {"rollout.forced_lengths": [3, 4, 2, 6, 5, 9], "rollout.max_new_tokens": 12, "checkpoint.at_end": True}


def broken(rule: str) -> list[str]:
    """Ours, but for one rule."""
    return [sys.executable, "-m", "warm_broken", rule, "rollout"]


@pytest.fixture(scope="module")
def node(start: Start) -> Node:
    return start("--serve", overrides=QUICK)


@pytest.fixture(scope="module")
def api(node: Node) -> Iterator[httpx.Client]:
    with node.api() as client:
        idle(node, client)
        yield client


def idle(node: Node, api: httpx.Client) -> None:
    node.until(lambda: api.get("/status").json()["phase"] == "IDLE", "idleness")


def iterate(node: Node, api: httpx.Client, count: int) -> None:
    done = api.get("/status").json()["iterations_done"]
    api.post("/iterations", json={"count": count}).raise_for_status()
    node.until_iterations(done + count)
    idle(node, api)


def swap(
    node: Node, api: httpx.Client, command: Sequence[str], *, role: str = "rollout", meanwhile: int = 0
) -> dict[str, Any]:
    """Ask for a replacement, iterate meanwhile, and wait for what becomes of it."""
    answer = api.post(f"/services/{role}/swap", json={"command": list(command)})
    assert answer.status_code == 202, answer.text
    assert answer.json()["state"] == "testing"
    if meanwhile:
        iterate(node, api, meanwhile)
    node.until(lambda: state(api)["state"] in {"swapped", "refused"}, "an end of the replacement")
    return state(api)


def state(api: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = api.get("/status").json()["swap"]
    return found


def service(api: httpx.Client, role: str) -> dict[str, Any]:
    (found,) = [view for view in api.get("/services").json() if view["role"] == role]
    return dict(found)


def rollout(api: httpx.Client) -> dict[str, Any]:
    return service(api, "rollout")


@pytest.mark.timeout(300)
def test_a_rollout_is_replaced_before_iteration_3_and_back_before_6_while_the_run_goes_on(
    node: Node, api: httpx.Client
) -> None:
    iterate(node, api, 3)
    before = rollout(api)
    assert (before["command"], before["incarnation"]) == (BACK, 1)
    done = swap(node, api, OTHER)
    assert (done["state"], done["step"]) == ("swapped", 3), str(done)
    now = rollout(api)
    assert (now["command"], now["incarnation"]) == (OTHER, 2)
    assert now["pid"] != before["pid"]
    assert now["since_wall_s"] > before["since_wall_s"]
    iterate(node, api, 3)
    done = swap(node, api, BACK)
    assert (done["state"], done["step"]) == ("swapped", 6), str(done)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("command", "case"),
    [
        (broken("another_schema"), "hello"),
        (broken("reads_after_drain"), "drain"),
        (["/no/such/program"], "conformance"),
    ],
    ids=["handshake", "drain", "no program"],
)
def test_a_newcomer_that_does_not_conform_is_refused_by_name_and_the_run_goes_on(
    node: Node, api: httpx.Client, command: list[str], case: str
) -> None:
    refused = swap(node, api, command)
    assert (refused["state"], refused["case"]) == ("refused", case), str(refused)
    assert refused["got"]
    assert refused["needed"]
    assert rollout(api)["incarnation"] == 3


@pytest.mark.timeout(200)
def test_one_that_conforms_and_dies_when_it_takes_the_place_gives_it_back(node: Node, api: httpx.Client) -> None:
    refused = swap(node, api, broken("dies_in_a_real_run"), meanwhile=1)
    assert (refused["state"], refused["case"]) == ("refused", "takeover"), str(refused)
    assert "exit code 7" in refused["got"]
    now = rollout(api)
    assert (now["command"], now["incarnation"], now["state"]) == (BACK, 5, "ready")


@pytest.mark.timeout(300)
def test_a_prefix_service_is_replaced_too_and_one_that_ends_before_its_first_iteration_gives_the_place_back(
    node: Node, api: httpx.Client
) -> None:
    done = swap(node, api, OTHER_PREFIX, role="prefix")
    assert (done["state"], done["step"]) == ("swapped", 7), str(done)
    os.kill(service(api, "prefix")["pid"], signal.SIGKILL)
    node.until(lambda: state(api)["state"] == "refused", "the old program in its place")
    assert (state(api)["case"], service(api, "prefix")["incarnation"]) == ("takeover", 3)
    assert "killed by SIGKILL" in state(api)["got"]
    done = swap(node, api, OTHER_PREFIX, role="prefix")
    assert (done["state"], done["step"]) == ("swapped", 7), str(done)


@pytest.mark.timeout(300)
def test_a_trainer_is_replaced_over_the_weights_as_they_stand(node: Node, api: httpx.Client) -> None:
    before = service(api, "trainer")
    done = swap(node, api, OTHER_TRAINER, role="trainer")
    assert (done["state"], done["step"]) == ("swapped", 7), str(done)
    now = service(api, "trainer")
    assert (now["command"], now["incarnation"]) == (OTHER_TRAINER, before["incarnation"] + 1)


def test_what_cannot_be_replaced_is_a_conflict(api: httpx.Client) -> None:
    answer = api.post("/services/input/swap", json={"command": OTHER})
    assert answer.status_code == 409, answer.text
    assert answer.json()["error"]["needed"] == "rollout, prefix or trainer"
    assert api.post("/services/rollout/swap", json={"command": []}).status_code == 422


@pytest.mark.timeout(300)
def test_the_weights_are_those_of_a_run_without_replacements(node: Node, api: httpx.Client, start: Start) -> None:
    plain = start("--iterations", str(ITERATIONS), overrides=QUICK)
    iterate(node, api, ITERATIONS - api.get("/status").json()["iterations_done"])
    api.post("/stop", json={"when": "after_iteration", "exit": True}).raise_for_status()
    swapped, unswapped = node.wait(), plain.wait()
    assert (swapped.code, unswapped.code) == (0, 0), swapped.stderr + unswapped.stderr
    assert swapped.checkpoint() == unswapped.checkpoint()
    journalled(swapped)


def journalled(run: Finished) -> None:
    """What the run's journal says of its replacements."""
    swaps = run.of(ServiceSwapped)
    assert [(event.step, list(event.command), event.incarnation) for event in swaps] == [
        (3, OTHER, 2),
        (6, BACK, 3),
        (7, OTHER_PREFIX, 2),
        (7, OTHER_PREFIX, 4),
        (7, OTHER_TRAINER, 2),
    ]
    assert [list(event.replaced) for event in swaps[:2]] == [BACK, OTHER]
    assert [event.case for event in run.of(SwapRefused)] == ["hello", "drain", "conformance", "takeover", "takeover"]
