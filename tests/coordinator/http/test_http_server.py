from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import httpx
import pytest

from rollplex.errors import ConfigError, WaitError
from rollplex.journal.events import IterationStarted
from rollplex_coordinator.http import server as http_server
from rollplex_coordinator.http.listening import listen
from rollplex_coordinator.http.server import Server
from support.http_site import Site

MakeSite = Callable[..., "Site"]


def test_port_zero_is_any_free_port(make_site: MakeSite) -> None:
    site = make_site()
    assert site.server.port > 0
    assert site.server.url == f"http://127.0.0.1:{site.server.port}"
    assert httpx.get(site.server.url + "/healthz").status_code == 200


def test_a_port_that_is_taken_is_refused_by_the_name_of_the_holder() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}; got Address already in use, by process {os.getpid()} \("):
            listen("127.0.0.1", port)
    listen("127.0.0.1", port).close()


def test_a_port_that_was_only_bound_is_taken_too() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        with pytest.raises(ConfigError, match="Address already in use"):
            listen("127.0.0.1", other.getsockname()[1])


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104 - to be refused
def test_an_address_that_others_can_reach_needs_to_be_allowed(host: str) -> None:
    with pytest.raises(ConfigError, match=r"open to other machines; got http\.host .*allow_remote: true.*127\.0\.0\.1"):
        listen(host, 0)


def test_an_address_that_others_can_reach_may_be_allowed() -> None:
    with listen("0.0.0.0", 0, allow_remote=True) as listener:  # noqa: S104 - what is tested
        assert listener.getsockname()[0] == "0.0.0.0"  # noqa: S104


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "a" * 300])
def test_an_address_that_is_not_ours_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1|no address of this machine"):
        listen(host, 0, allow_remote=True)


def test_the_loopback_of_ipv6_has_brackets_in_its_url(make_site: MakeSite) -> None:
    site = make_site()
    try:
        listener = listen("::1", 0)
    except ConfigError:
        pytest.skip("no IPv6 here")
    server = Server(site.app, listener)
    server.start()
    assert server.url.startswith("http://[::1]:")
    assert httpx.get(server.url + "/healthz").status_code == 200
    server.stop()


def test_requests_that_come_before_the_server_starts_are_answered(make_site: MakeSite) -> None:
    site = make_site()
    listener = listen("127.0.0.1", 0)
    server = Server(site.app, listener)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as early:
        early.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        server.start()
        assert early.recv(64).startswith(b"HTTP/1.1 200")
    server.stop()


def test_after_a_stop_the_port_is_free_and_the_thread_gone(make_site: MakeSite) -> None:
    site = make_site()
    site.server.stop()
    site.server.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "http"]
    listen("127.0.0.1", site.server.port).close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(site.server.url + "/healthz")


def test_a_server_that_never_started_can_be_stopped(make_site: MakeSite) -> None:
    listener = listen("127.0.0.1", 0)
    Server(make_site().app, listener).stop()
    assert listener.fileno() == -1


def test_a_stop_ends_within_its_deadline_with_an_open_stream(make_site: MakeSite) -> None:
    site = make_site()
    with site.client() as client, client.stream("GET", "/events") as answer:
        lines = answer.iter_lines()
        assert next(lines) == "retry: 1000"
        site.server.stop(deadline_s=5.0)
        assert "retry" not in "".join(lines)


def test_a_stop_ends_within_its_deadline_with_a_client_that_never_reads(make_site: MakeSite, token: str) -> None:
    site = make_site()
    for step in range(600):
        site.journal.append(IterationStarted(step=step, version=0, rows=tuple(range(10_000))))
    site.journal.flush()
    request = f"GET /events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", site.server.port), timeout=10) as idle:
        idle.sendall(request.encode())
        assert idle.recv(12) == b"HTTP/1.1 200"
        site.server.stop(deadline_s=5.0)
    assert site.app.state.rollplex.streams.open == 0


def test_a_stop_that_a_call_of_the_core_holds_up_says_so(make_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    site = make_site()
    asked, answered = threading.Event(), threading.Event()
    status = site.control.status

    def slow() -> object:
        asked.set()
        assert answered.wait(20)
        return status()

    monkeypatch.setattr(site.control, "status", slow)
    with site.client() as client:
        asking = threading.Thread(target=lambda: ignore_errors(client))
        asking.start()
        assert asked.wait(10)
        with pytest.raises(WaitError, match="the HTTP thread does not end"):
            site.server.stop(deadline_s=0.05)
        answered.set()
        asking.join(10)
        site.server.stop(deadline_s=5.0)


def ignore_errors(client: httpx.Client) -> None:
    with contextlib.suppress(httpx.HTTPError):
        client.get("/status")


def test_a_thread_that_cannot_serve_is_an_error_at_the_start(
    make_site: MakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    listener = listen("127.0.0.1", 0)
    server = Server(make_site().app, listener)
    listener.close()
    with pytest.raises(WaitError, match="the HTTP thread does not serve"):
        server.start()
    assert "the HTTP thread ended" in caplog.text
    server.stop()


HEADERS = b"POST /iterations HTTP/1.1\r\nHost: localhost\r\n"
WHOLE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", HEADERS, WHOLE + HEADERS])
def test_headers_that_do_not_end_in_time_cost_the_connection(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """So that nobody can hold the places of all others; also a client that sends a byte now and then."""
    monkeypatch.setattr(http_server, "HEADERS_S", 0.3)
    with socket.create_connection(("127.0.0.1", make_site().server.port), timeout=10) as client:
        client.sendall(sent)
        client.settimeout(0.05)
        end = time.monotonic() + 20
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < end:
                with contextlib.suppress(TimeoutError):
                    if not client.recv(65_536):
                        break
                client.sendall(b"X" if sent else b"")
        assert time.monotonic() < end


def test_a_request_that_is_whole_may_take_longer_than_its_headers(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEADERS_S", 0.3)
    site = make_site()
    status = site.control.status

    def slow() -> object:
        time.sleep(0.6)
        return status()

    monkeypatch.setattr(site.control, "status", slow)
    with site.client() as client:
        for _ in range(2):
            assert client.get("/status").status_code == 200


def test_signals_stay_as_they_were(make_site: MakeSite) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    make_site()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
