"""Routes of past runs, over a folder with two of them; and that they work where no run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rollplex.protocol.common import ErrorReport
from rollplex_coordinator.http import past, sample_views
from rollplex_coordinator.http.app import create_history_app
from rollplex_coordinator.http.listening import listen
from rollplex_coordinator.http.server import Server
from support.http_site import TOKEN
from support.past_runs import PNG, write_run


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "good")
    write_run(folder / "bad", error=ErrorReport(kind="WorkerDied", what="the trainer service died", got="SIGKILL"))
    write_run(folder / "good" / "attempts" / "1", steps=1)
    return folder


@pytest.fixture(scope="module")
def archive(runs_dir: Path) -> Iterator[httpx.Client]:
    server = Server(create_history_app(runs_dir, TOKEN, []), listen("127.0.0.1", 0))
    server.start()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=20, trust_env=False) as client:
        yield client
    server.stop()


def test_runs_are_listed_with_attempts_and_how_each_ended(archive: httpx.Client) -> None:
    found = {(run["name"], run["attempt"]): run for run in archive.get("/runs").json()}
    assert {key: run["state"] for key, run in found.items()} == {
        ("good", 0): "done",
        ("good", 1): "done",
        ("bad", 0): "failed",
    }
    assert found["bad", 0]["error"]["error"]["what"] == "the trainer service died"
    assert found["bad", 0]["error"]["service"] == "trainer[0:0]"
    assert not any(run["current"] for run in found.values())


def test_numbers_of_a_run_and_of_an_attempt(archive: httpx.Client) -> None:
    parameters: dict[str, str | int | list[str]] = {"name": ["reward", "kl"]}
    found = archive.get("/runs/good/metrics", params=parameters).json()
    assert found["steps"] == [0, 1, 2]
    assert found["values"] == {"reward": [0.0, 0.1, 0.2], "kl": [None] * 3}
    assert archive.get("/runs/good/metrics", params=parameters | {"attempt": 1}).json()["steps"] == [0]


def test_a_timeline_is_phases_and_lanes(archive: httpx.Client) -> None:
    found = archive.get("/runs/good/timeline", params={"first": 1, "count": 1}).json()
    assert found["steps"] == [1]
    assert {lane["name"] for lane in found["lanes"]} >= {"rollout[0:0]", "prefix[0:0]", "trainer[0:0]", "rewards"}
    assert found["phases"][0]["name"] == "ROLLOUT"


def test_samples_are_searched_by_row_reward_and_step_and_their_pictures_are_had(archive: httpx.Client) -> None:
    parameters: dict[str, float] = {"row": 21, "reward_from": 0.5, "reward_to": 0.5, "step_from": 1, "step_to": 2}
    (sample,) = archive.get("/runs/good/samples", params=parameters).json()["samples"]
    assert (sample["step"], sample["group"], sample["row"]) == (2, 1, 21)
    assert [item["text"] for item in sample["responses"]] == ["answer 1"]
    assert [item["index"] for item in sample["pictures"]] == [0, None]
    answer = archive.get("/runs/good/samples/2/1/0")
    assert (answer.status_code, answer.headers["content-type"], answer.content) == (200, "image/png", PNG)


def test_a_long_response_and_a_large_group_are_cut_and_say_so(
    archive: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_views, "MAX_CHARS", 3)
    monkeypatch.setattr(sample_views, "MAX_RESPONSES", 1)
    (sample,) = archive.get("/runs/good/samples", params={"row": 0}).json()["samples"]
    (response,) = sample["responses"]
    assert (response["text"], response["more_characters"], sample["more_responses"]) == ("ans", 5, 3)


@pytest.mark.parametrize(
    "path",
    [
        "/runs/%2e%2e/metrics?name=reward",
        "/runs/..%2Fgood/metrics?name=reward",
        "/runs/good%2Fattempts%2F1/metrics?name=reward",
        "/runs/%2Fetc/timeline",
        "/runs/good%00/samples",
        "/runs/this/metrics?name=reward",
        "/runs/good/timeline?attempt=9",
        "/runs/good/samples/1/0/0",
        "/runs/good/samples/2/0/1",
    ],
)
def test_what_is_not_there_is_404_and_says_what_would_be(archive: httpx.Client, path: str) -> None:
    answer = archive.get(path)
    assert answer.status_code == 404, answer.text
    assert answer.json()["error"]["kind"] == "NotFoundError"


@pytest.mark.parametrize(
    "path",
    [
        "/runs/good/metrics",
        "/runs/good/metrics?name=" + "&name=".join("x" * 33),
        "/runs/good/metrics?name=reward&points=100000",
        "/runs/good/timeline?count=1000",
        "/runs/good/timeline?first=-1",
        "/runs/good/samples?limit=1000",
        "/runs/good/samples?reward_from=nan",
        "/runs/good/samples/..%2F0/0/0",
        "/runs/good/samples/a/0/0",
    ],
)
def test_a_question_beyond_the_limits_is_refused(archive: httpx.Client, path: str) -> None:
    assert archive.get(path).status_code in {400, 404}


def test_every_address_without_the_token_is_refused_but_the_pages(archive: httpx.Client) -> None:
    with httpx.Client(base_url=archive.base_url, trust_env=False) as stranger:
        for path in [*archive.get("/openapi.json").json()["paths"], "/docs", "/openapi.json"]:
            assert stranger.get(path).status_code == 401, path
        assert stranger.get("/").status_code == 200


def test_more_readers_than_allowed_wait_and_are_then_told(
    archive: httpx.Client, monkeypatch: pytest.MonkeyPatch, runs_dir: Path
) -> None:
    monkeypatch.setattr(past, "READERS", 1)
    monkeypatch.setattr(past, "WAIT_S", 0.01)
    app = create_history_app(runs_dir, TOKEN, [])
    busy = app.state.past
    server = Server(app, listen("127.0.0.1", 0))
    server.start()
    try:
        with httpx.Client(base_url=server.url, headers=archive.headers, trust_env=False) as client:
            with busy.reading():
                answer = client.get("/runs")
                assert (answer.status_code, answer.json()["error"]["kind"]) == (503, "UnavailableError")
            assert client.get("/runs").status_code == 200
    finally:
        server.stop()
