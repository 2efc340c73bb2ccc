"""The control API as the command line asks it."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from rollplex.cli.api import Api, connect
from rollplex.errors import BudgetError, ProtocolError, RollplexError, StateError, WaitError
from rollplex.journal.events import StopWhen
from rollplex.protocol.claim import claim
from support.http_site import TOKEN
from support.runs import LiveRun, ended, leave, started


def test_everything_that_is_asked_is_understood(tmp_path: Path) -> None:
    with LiveRun(tmp_path / "a-1") as live, connect(live.run_dir) as api:
        status = api.status()
        assert (status.run, status.phase, status.iterations_done, status.stopping) == ("r1", "ROLLOUT", 4, None)
        assert [(wait.awaited, wait.source, wait.deadline_s) for wait in status.waiting] == [
            ("unit 3", "rollout[0:0]", 60.0)
        ]
        ledger = api.ledger()
        assert [(d.device, d.budget_bytes, d.leased_bytes, d.peak_bytes) for d in ledger.devices] == [
            ("0:0", 128, 64, 96)
        ]
        assert [(w.owner, w.size_bytes) for w in ledger.waiting] == [("prefix", 100)]
        assert [(s.service, s.state, s.pid) for s in api.services()] == [
            ("trainer[0:0]", "busy", 7),
            ("prefix[0:0]", "dead", 8),
        ]
        assert api.metrics_from(3, 50) == [(3, {"reward": 0.5, "kl": None})]
        api.start(7)
        api.stop(now=True, leave=True)
        api.stop(now=False, leave=False)
        assert live.control.calls[-3:] == [
            ("start", 7),
            ("stop", StopWhen.NOW, True),
            ("stop", StopWhen.AFTER_ITERATION, False),
        ]


def test_a_refusal_keeps_its_words_and_its_kind(tmp_path: Path) -> None:
    with LiveRun(tmp_path / "a-1") as live, connect(live.run_dir) as api:
        live.control.error = StateError("the run is stopping", got="start 7", needed="a run that goes on", do="Wait.")
        with pytest.raises(StateError, match=r"the run is stopping; got start 7; needed a run that goes on\. Wait\."):
            api.start(7)
        live.control.error = BudgetError("no room")
        with pytest.raises(RollplexError, match="no room"):
            api.start(7)


def test_a_wrong_token_is_refused_in_words(tmp_path: Path) -> None:
    with (
        LiveRun(tmp_path / "a-1") as live,
        Api(live.site.server.url, "x" * 43) as api,
        pytest.raises(RollplexError, match="token"),
    ):
        api.status()


def test_a_coordinator_that_does_not_answer_is_named_with_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollplex.cli.api.ANSWER_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with (
            Api(f"http://127.0.0.1:{silent.getsockname()[1]}", TOKEN) as api,
            pytest.raises(WaitError, match="does not answer; got ReadTimeout.*`rollplex down`"),
        ):
            api.status()
        port = silent.getsockname()[1]
    with Api(f"http://127.0.0.1:{port}", TOKEN) as api, pytest.raises(WaitError, match="ConnectError"):
        api.status()


def test_something_else_that_answers_there_is_no_coordinator(tmp_path: Path) -> None:
    with (
        LiveRun(tmp_path / "a-1") as live,
        Api(f"{live.site.server.url}/docs", TOKEN) as api,
        pytest.raises(RollplexError),
    ):
        api.status()
    with (
        LiveRun(tmp_path / "a-2") as live,
        Api(live.site.server.url, TOKEN) as api,
        pytest.raises(ProtocolError, match="no coordinator of this version"),
    ):
        api._ask("GET", "/metrics", dict)


def test_a_coordinator_with_too_many_connections_is_told_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            with listener.accept()[0] as client:
                client.recv(65_536)
                client.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 19\r\n\r\nService Unavailable")

        thread = threading.Thread(target=refuse)
        thread.start()
        port = listener.getsockname()[1]
        with (
            Api(f"http://127.0.0.1:{port}", TOKEN) as api,
            pytest.raises(WaitError, match="too many connections at once"),
        ):
            api.status()
        thread.join(10)


def test_a_run_that_has_ended_cannot_be_asked(tmp_path: Path) -> None:
    leave(tmp_path / "a-1", started(), ended())
    with pytest.raises(StateError, match="not going on.*`rollplex up CONFIG --serve`"):
        connect(tmp_path / "a-1")


def test_a_run_that_is_starting_cannot_be_asked_yet_whatever_the_one_before_left(tmp_path: Path) -> None:
    with claim(tmp_path / "a-1", "r2"):
        with pytest.raises(WaitError, match="only starting"):
            connect(tmp_path / "a-1")
        (tmp_path / "a-1" / "token").write_text(TOKEN)
        (tmp_path / "a-1" / "http.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "run": "r1"}))
        with pytest.raises(WaitError, match="the address of r1, which has ended"):
            connect(tmp_path / "a-1")
