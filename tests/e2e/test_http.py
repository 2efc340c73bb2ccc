"""The control API of a live node: each route once with effect, and the gates in front of them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from support.nodes import Node, Start


@pytest.fixture(scope="module")
def node(start: Start) -> Node:
    return start("--serve")


@pytest.fixture(scope="module")
def api(node: Node) -> Iterator[httpx.Client]:
    with node.api() as client:
        node.until(lambda: client.get("/status").json()["phase"] == "IDLE", "the loaded node")
        yield client


def events(api: httpx.Client, after: int, limit: int | None = None) -> list[int]:
    """Ids of the journal's events as the stream gives them."""
    ids = []
    with api.stream("GET", "/events", params={"after": after, "follow": "false"}) as response:
        for line in response.iter_lines():
            if line.startswith("id:"):
                ids.append(int(line[3:]))
                if len(ids) == limit:
                    break
    return ids


@pytest.mark.timeout(150)
def test_iterations_start_and_the_node_goes_idle_after_them(node: Node, api: httpx.Client) -> None:
    answer = api.post("/iterations", json={"count": 2})
    assert answer.status_code in {200, 202}, answer.text
    node.until_iterations(2)
    node.until(lambda: api.get("/status").json()["phase"] == "IDLE", "idleness")
    status = api.get("/status").json()
    assert (status["iterations_done"], status["iterations_wanted"], status["version"]) == (2, 2, 2)
    assert status["waiting"] == []
    one = api.get("/iterations/1").json()
    assert (one["state"], one["version"], one["version_after"]) == ("committed", 1, 2)
    assert set(one["phases_s"]) >= {"ROLLOUT", "SCORE", "TRAIN", "UPDATE"}
    assert len(api.get("/iterations").json()) >= 1
    assert api.get("/iterations/7").status_code == 404


@pytest.mark.timeout(60)
def test_services_ledger_and_metrics_show_the_node(node: Node, api: httpx.Client) -> None:
    services = {view["role"]: view for view in listed(api.get("/services").json())}
    assert set(services) == {"rollout", "prefix", "trainer", "input", "reward"}
    assert {role: view["pid"] for role, view in services.items()} == {
        role: pid for role, pid in node.pids().items() if role != "coordinator"
    }
    kinds = {lease["kind"] for lease in api.get("/ledger").json()["leases"]}
    assert kinds >= {"actor_weights", "reference_weights", "gradients", "optimizer_state"}
    assert "rollplex_" in api.get("/metrics").text
    assert api.get("/docs").status_code == 200
    assert httpx.get(f"{api.base_url}/healthz").status_code == 200


def listed(answer: object) -> list[dict[str, object]]:
    """The list in an answer, bare or under its one key."""
    if isinstance(answer, dict):
        (answer,) = [value for value in answer.values() if isinstance(value, list)]
    assert isinstance(answer, list)
    return answer


@pytest.mark.timeout(60)
def test_a_checkpoint_is_written_on_request(node: Node, api: httpx.Client) -> None:
    assert api.post("/checkpoints", json={}).status_code in {200, 202}
    node.until(lambda: len(listed(api.get("/checkpoints").json())) == 1, "the checkpoint")
    (one,) = listed(api.get("/checkpoints").json())
    assert (one["step"], one["version"]) == (2, 2)


@pytest.mark.timeout(60)
def test_events_resumed_by_id_lose_and_repeat_nothing(api: httpx.Client) -> None:
    everything = events(api, 0)
    assert everything == list(range(1, len(everything) + 1))
    first = events(api, 0, limit=7)
    rest = events(api, first[-1])
    assert (first + rest)[: len(everything)] == everything


@pytest.mark.timeout(60)
def test_every_route_refuses_without_a_token_with_a_wrong_one_and_from_a_foreign_host(api: httpx.Client) -> None:
    paths = json.loads(api.get("/openapi.json").text)["paths"]
    assert len(paths) >= 11
    for path, methods in paths.items():
        for method in methods:
            url = f"{api.base_url}{path.replace('{step}', '0')}"
            token = api.headers["Authorization"]
            if path != "/healthz":
                for headers in ({}, {"Authorization": "Bearer " + "x" * 43}):
                    answer = httpx.request(method, url, headers=headers, json={} if method == "post" else None)
                    assert answer.status_code == 401, (method, path)
            foreign = {"Authorization": token, "Host": "evil.example"}
            assert httpx.request(method, url, headers=foreign).status_code in {400, 421}, (method, path)


@pytest.mark.timeout(60)
def test_stop_ends_the_node_with_exit_code_0(node: Node, api: httpx.Client) -> None:
    api.post("/iterations", json={"count": 1000}).raise_for_status()
    api.post("/stop", json={"when": "after_iteration", "exit": True}).raise_for_status()
    done = node.wait(30)
    assert done.code == 0, done.stderr
    assert len(done.metrics) in {2, 3}
