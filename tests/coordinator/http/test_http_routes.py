from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from rollplex.errors import BudgetError, ModelError, RollplexError, StateError, WaitError
from rollplex.journal.events import StopWhen
from rollplex_coordinator.http.views import HealthPart
from support.http_site import FakeControl

CHANGES = [
    ("/iterations", {"count": 3}, ("start", 3)),
    ("/stop", {"when": "after_iteration", "exit": False}, ("stop", StopWhen.AFTER_ITERATION, False)),
    ("/stop", {"when": "now"}, ("stop", StopWhen.NOW, True)),
    ("/checkpoints", {}, ("checkpoint",)),
]
QUESTIONS = [
    ("/status", ("status",)),
    ("/iterations", ("iterations", 0, 100)),
    ("/iterations?first=2&limit=5", ("iterations", 2, 5)),
    ("/iterations/4", ("iteration", 4)),
    ("/ledger", ("ledger",)),
    ("/services", ("services",)),
    ("/checkpoints", ("checkpoints",)),
    ("/healthz", ("health",)),
]


@pytest.mark.parametrize(("path", "body", "call"), CHANGES)
def test_a_change_reaches_the_core_once_and_answers_with_the_status(
    client: httpx.Client, control: FakeControl, path: str, body: dict[str, object], call: tuple[object, ...]
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 202
    assert control.calls == [call]
    assert answer.json()["run"] == "r1"


@pytest.mark.parametrize(("path", "call"), QUESTIONS)
def test_a_question_reaches_the_core_once(
    client: httpx.Client, control: FakeControl, path: str, call: tuple[object, ...]
) -> None:
    assert client.get(path).status_code == 200
    assert control.calls == [call]


def test_the_status_says_what_is_waited_for_from_whom_since_when(client: httpx.Client) -> None:
    (wait,) = client.get("/status").json()["waiting"]
    assert wait == {
        "for": "unit 3",
        "from": "rollout[0:0]",
        "age_s": 1.5,
        "since_wall_s": 100.0,
        "deadline_s": 60.0,
    }


def test_a_metric_that_is_not_finite_is_null(client: httpx.Client) -> None:
    assert client.get("/iterations/4").json()["metrics"] == {"reward": 0.5, "kl": None}
    (view,) = client.get("/iterations").json()
    assert view["metrics"]["kl"] is None


def test_digests_are_asked_for_and_compared(client: httpx.Client, control: FakeControl) -> None:
    answer = client.post("/services/digests", json={})
    assert (answer.status_code, answer.json()["agree"]) == (200, True)
    assert [view["service"] for view in answer.json()["digests"]] == ["trainer[0:0]", "prefix[0:0]"]
    control.digest = "another"
    assert client.post("/services/digests", json={}).json()["agree"] is False
    assert control.calls == [("digests",), ("digests",)]


def test_a_replacement_reaches_the_core_and_answers_with_what_is_to_become_of_it(
    client: httpx.Client, control: FakeControl
) -> None:
    answer = client.post("/services/rollout/swap", json={"command": ["serve", "--fast"]})
    assert (answer.status_code, answer.json()["state"]) == (202, "testing")
    assert control.calls == [("swap", "rollout", ("serve", "--fast"))]
    wrong: list[dict[str, object]] = [
        {"command": []},
        {"command": "serve"},
        {"command": [""]},
        {"command": ["x"], "shell": True},
        {},
    ]
    for body in wrong:
        assert client.post("/services/rollout/swap", json=body).status_code == 422, body
    assert client.post("/services/nobody/swap", json={"command": ["serve"]}).status_code == 400
    assert len(control.calls) == 1


def test_the_surface_is_exactly_this(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert {(method, path) for path, methods in paths.items() for method in methods} == {
        ("get", "/status"),
        ("post", "/stop"),
        ("get", "/iterations"),
        ("post", "/iterations"),
        ("get", "/iterations/{step}"),
        ("get", "/ledger"),
        ("get", "/services"),
        ("post", "/services/digests"),
        ("post", "/services/{role}/swap"),
        ("get", "/checkpoints"),
        ("post", "/checkpoints"),
        ("get", "/events"),
        ("get", "/metrics"),
        ("get", "/healthz"),
        ("get", "/runs"),
        ("get", "/runs/{run}/metrics"),
        ("get", "/runs/{run}/timeline"),
        ("get", "/runs/{run}/samples"),
        ("get", "/runs/{run}/samples/{step}/{group}/{index}"),
    }


def test_no_get_changes_anything(client: httpx.Client, control: FakeControl) -> None:
    for path, methods in client.get("/openapi.json").json()["paths"].items():
        if "get" in methods:
            client.get(path.replace("{step}", "1"), params={"follow": "false", "count": 1, "when": "now"})
    assert {call[0] for call in control.calls} == {
        "status",
        "iterations",
        "iteration",
        "ledger",
        "services",
        "checkpoints",
        "health",
    }


def test_an_iteration_that_never_started_is_not_found(client: httpx.Client) -> None:
    answer = client.get("/iterations/99")
    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "kind": "NotFoundError",
        "what": "no such iteration",
        "got": "step 99",
        "needed": "one that has been started",
        "do": "",
        "where": "",
    }


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StateError("the run is ending", got="DRAIN", needed="IDLE", do="Start a new run."), 409),
        (BudgetError("too much"), 409),
        (WaitError("the core did not answer"), 504),
        (ModelError("no such model"), 500),
    ],
)
def test_an_error_of_the_core_keeps_its_kind_and_its_words(
    client: httpx.Client, control: FakeControl, error: RollplexError, status: int
) -> None:
    control.error = error
    answer = client.post("/iterations", json={"count": 1})
    assert answer.status_code == status
    shown = answer.json()["error"]
    assert (shown["kind"], shown["what"]) == (type(error).__name__, error.what)
    assert (shown["got"], shown["needed"], shown["do"]) == (error.got, error.needed, error.do)


def test_a_bug_is_an_error_without_its_secrets_and_the_server_goes_on(
    client: httpx.Client, control: FakeControl, caplog: pytest.LogCaptureFixture
) -> None:
    control.error = ZeroDivisionError("a secret")
    answer = client.get("/status")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "a secret" in caplog.text
    control.error = None
    assert client.get("/status").status_code == 200


BAD_BODIES: list[tuple[str, bytes]] = [
    ("/iterations", b"{}"),
    ("/iterations", b'{"count": 0}'),
    ("/iterations", b'{"count": "3"}'),
    ("/iterations", b'{"count": true}'),
    ("/iterations", b'{"count": 1.5}'),
    ("/iterations", b'{"count": 1e999}'),
    ("/iterations", b'{"count": 99999999999}'),
    ("/iterations", b'{"count": 1, "more": 2}'),
    ("/iterations", b"[1]"),
    ("/iterations", b""),
    ("/iterations", b'{"count": '),
    ("/iterations", b"\xc3\x28"),
    ("/iterations", b"[" * 60_000),
    ("/stop", b"{}"),
    ("/stop", b'{"when": "tomorrow"}'),
    ("/stop", b'{"when": "now", "exit": "no"}'),
    ("/checkpoints", b'{"now": true}'),
    ("/services/digests", b"7"),
]


@pytest.mark.parametrize(("path", "body"), BAD_BODIES, ids=lambda value: repr(value)[:30])
def test_a_body_that_is_not_what_it_must_be_is_refused(
    client: httpx.Client, control: FakeControl, path: str, body: bytes
) -> None:
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["error"]["kind"] == "BodyError"
    assert control.calls == []


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/iterations?limit=0", 400),
        ("/iterations?limit=1001", 400),
        ("/iterations?first=-1", 400),
        ("/iterations/abc", 400),
        ("/iterations/-1", 400),
        ("/events?after=-1", 400),
        ("/events?after=99999999999999999999", 400),
        ("/nowhere", 404),
        ("/healthz/", 404),
    ],
)
def test_an_address_that_is_not_what_it_must_be_is_refused(
    client: httpx.Client, control: FakeControl, path: str, status: int
) -> None:
    assert client.get(path).status_code == status
    assert control.calls == []


@pytest.mark.parametrize("path", ["/checkpoints", "/services/digests"])
def test_a_change_that_needs_no_more_than_its_address_may_have_no_body(
    client: httpx.Client, control: FakeControl, path: str
) -> None:
    assert client.post(path, headers={"Content-Type": "application/json"}).is_success
    assert len(control.calls) == 1


def test_health_names_what_is_down(client: httpx.Client, control: FakeControl) -> None:
    assert client.get("/healthz").json()["ok"] is True
    control.parts = (HealthPart(name="trainer[0:0]", ok=True), HealthPart(name="rollout[0:0]", ok=False, detail="dead"))
    answer = client.get("/healthz")
    assert answer.status_code == 503
    assert (answer.json()["ok"], answer.json()["down"]) == (False, ["rollout[0:0]"])
    control.error = WaitError("the core did not answer")
    answer = client.get("/healthz")
    assert answer.status_code == 503
    assert answer.json()["down"] == ["core"]
    assert answer.json()["parts"][0]["detail"] == "the core did not answer"


def test_many_questions_for_health_are_one_for_the_core(
    client: httpx.Client, control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollplex_coordinator.http.health.REMEMBERED_S", 1_000.0)
    for _ in range(5):
        client.get("/healthz")
    assert control.calls == [("health",)]


def test_the_documentation_shows_every_route_and_loads_nothing(client: httpx.Client) -> None:
    page = client.get("/docs")
    assert page.headers["Content-Type"].startswith("text/html")
    for path, methods in client.get("/openapi.json").json()["paths"].items():
        for method in methods:
            assert f"<h2>{method.upper()} {path}</h2>" in page.text
    assert not re.search(r"<script|src=|href=|https?://|@import", page.text)
    assert "{&quot;count&quot;: 1}" in page.text
    assert "{&quot;when&quot;: &quot;after_iteration&quot;}" in page.text
    assert "{&quot;command&quot;: [&quot;TEXT&quot;]}" in page.text


def test_the_document_names_the_token_where_it_is_needed(client: httpx.Client) -> None:
    document: dict[str, Any] = client.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert ("security" in operation) == (path != "/healthz")
            assert "4XX" in operation["responses"]
