from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from rollplex.errors import ConfigError
from rollplex_coordinator.http.guard import MAX_BODY_BYTES, Guard
from support.http_site import FakeControl, Site

UNLISTED = ["/docs", "/openapi.json", "/nowhere", "/web/nothing.js", "/healthz/x", "/%2Fhealthz", "/HEALTHZ"]
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "QUERY"]
JSON = {"Content-Type": "application/json"}


def addresses(client: httpx.Client) -> list[str]:
    """Every address of the OpenAPI document, and those that are not in it."""
    return [path.replace("{step}", "1") for path in client.get("/openapi.json").json()["paths"]] + UNLISTED


def every_request(client: httpx.Client) -> Iterator[tuple[str, str]]:
    for path in addresses(client):
        for method in METHODS:
            yield method, path


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Bearer"], ids=["no token", "wrong one", "empty one"])
def test_every_route_and_method_without_the_token_is_refused(
    client: httpx.Client, control: FakeControl, shared_site: Site, authorization: str | None
) -> None:
    headers = JSON | ({"Authorization": authorization} if authorization else {})
    with httpx.Client(base_url=shared_site.server.url, headers=headers) as stranger:
        for method, path in every_request(client):
            answer = stranger.request(method, path, content=b"{}" if method == "POST" else None)
            assert answer.status_code == (200 if (method, path) == ("GET", "/healthz") else 401), (method, path)
    assert control.calls == [("health",)]


def test_every_route_and_method_under_a_foreign_host_is_refused(client: httpx.Client, control: FakeControl) -> None:
    for method, path in every_request(client):
        answer = client.request(method, path, headers=JSON | {"Host": f"evil.example:{client.base_url.port}"})
        assert answer.status_code == 421, (method, path)
    assert control.calls == []


def test_every_method_but_get_and_post_is_refused_with_the_token_too(
    client: httpx.Client, control: FakeControl
) -> None:
    for method, path in every_request(client):
        if method not in {"GET", "POST"}:
            assert client.request(method, path, headers=JSON).status_code == 405, (method, path)
    assert client.post("/status", headers=JSON).status_code == 405
    assert control.calls == []


@pytest.mark.parametrize(
    "headers",
    [
        [("Authorization", "Basic {token}")],
        [("Authorization", "{token}")],
        [("Authorization", "Bearer {token}x")],
        [("Authorization", "Bearer {token}"), ("Authorization", "Bearer {token}")],
        [("Authorization", "Bearer wrong"), ("Authorization", "Bearer {token}")],
        [("Cookie", "Authorization=Bearer {token}")],
        [("X-Authorization", "Bearer {token}")],
        [("Authorization", "Bearer \xe9\xff")],
    ],
)
def test_the_token_counts_only_whole_and_in_its_header(
    shared_site: Site, token: str, headers: list[tuple[str, str]]
) -> None:
    sent = [(name.encode(), value.replace("{token}", token).encode("latin-1")) for name, value in headers]
    address = f"{shared_site.server.url}/status?token={token}&access_token={token}"
    answer = httpx.get(address, headers=sent)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert token not in answer.text


def test_the_scheme_may_be_written_in_small_letters(shared_site: Site, token: str) -> None:
    assert httpx.get(f"{shared_site.server.url}/status", headers={"Authorization": f"bearer {token}"}).is_success


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:1",
        "localhost",
        "LocalHost:65535",
        "[::1]",
        "[::1]:80",
        "coordinator",
        "Coordinator:8000",
    ],
)
def test_a_request_may_be_addressed_to_us_by_any_of_our_names(client: httpx.Client, host: str) -> None:
    assert client.get("/status", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "evil.example:80@localhost",
        "localhost:80:80",
        "localhost:",
        "localhost:http",
        "localhost.",
        "::1",
        "[::1",
        "[::2]",
        "0.0.0.0",  # noqa: S104 - a name in a header
        "127.0.0.2",
        "127.1",
        "2130706433",
        "localhost, evil.example",
        "coordinator.evil.example",
    ],
)
def test_a_request_to_any_other_name_is_refused(client: httpx.Client, control: FakeControl, host: str) -> None:
    assert client.get("/status", headers={"Host": host}).status_code == 421
    assert client.get("/healthz", headers={"Host": host}).status_code == 421
    assert control.calls == []


@pytest.mark.parametrize(
    "host_lines", [b"", b"Host: localhost\r\nHost: evil.example\r\n"], ids=["no host", "two hosts"]
)
def test_a_request_without_one_host_is_refused(shared_site: Site, token: str, host_lines: bytes) -> None:
    request = b"GET /status HTTP/1.0\r\nAuthorization: Bearer " + token.encode() + b"\r\n" + host_lines + b"\r\n"
    with socket.create_connection(("127.0.0.1", shared_site.server.port), timeout=10) as plain:
        plain.sendall(request)
        assert plain.recv(64).startswith((b"HTTP/1.1 421", b"HTTP/1.1 400"))


@pytest.mark.parametrize("path", ["/iterations", "/stop", "/services/digests", "/checkpoints"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content-Type": "application/jsonp"}, 415),
        ({"Content-Type": "text/plain; application/json"}, 415),
        ({}, 415),
        (JSON | {"Origin": "http://evil.example"}, 403),
        (JSON | {"Origin": "null"}, 403),
        (JSON | {"Origin": "http://localhost:1"}, 403),
        (JSON | {"Origin": "http://127.0.0.1.evil.example"}, 403),
        (JSON | {"Origin": ""}, 403),
        (JSON | {"Sec-Fetch-Site": "cross-site"}, 403),
        (JSON | {"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
def test_a_change_that_a_foreign_page_could_ask_for_is_refused(
    client: httpx.Client, control: FakeControl, path: str, headers: dict[str, str], status: int
) -> None:
    body = b'{"count": 1, "when": "now"}'
    assert client.post(path, content=body, headers=headers).status_code == status
    assert control.calls == []


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_a_change_asked_for_by_our_own_page_is_made(client: httpx.Client, control: FakeControl, site: str) -> None:
    origin = str(client.base_url).rstrip("/")
    headers = {"Content-Type": "Application/JSON; charset=utf-8", "Origin": origin, "Sec-Fetch-Site": site}
    assert client.post("/iterations", content=b'{"count": 1}', headers=headers).status_code == 202
    assert control.calls == [("start", 1)]


def test_no_page_of_another_site_may_read_an_answer(client: httpx.Client) -> None:
    answer = client.get("/status", headers={"Origin": "http://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert "set-cookie" not in answer.headers
    preflight = client.options(
        "/iterations", headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    )
    assert preflight.status_code == 405
    assert not [name for name in preflight.headers if name.startswith("access-control")]


def test_every_answer_forbids_caching_sniffing_and_scripts(client: httpx.Client, shared_site: Site) -> None:
    refused = httpx.get(f"{shared_site.server.url}/status")
    for answer in (client.get("/status"), client.get("/docs"), client.get("/nowhere"), refused):
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert "server" not in answer.headers


def test_a_body_above_the_limit_is_refused_declared_or_not(client: httpx.Client, control: FakeControl) -> None:
    body = b'{"count": 1' + b" " * MAX_BODY_BYTES + b"}"
    assert client.post("/iterations", content=body, headers=JSON).status_code == 413
    pieces = (body[i : i + 4096] for i in range(0, len(body), 4096))
    assert client.post("/iterations", content=pieces, headers=JSON).status_code == 413
    assert control.calls == []
    fitting = b'{"count": 1' + b" " * (MAX_BODY_BYTES - 12) + b"}"
    assert client.post("/iterations", content=fitting, headers=JSON).status_code == 202


def test_a_body_that_does_not_arrive_is_given_up(
    shared_site: Site, control: FakeControl, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollplex_coordinator.http.guard.BODY_DEADLINE_S", 0.05)
    head = f"POST /stop HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
    with socket.create_connection(("127.0.0.1", shared_site.server.port), timeout=10) as slow:
        slow.sendall(head.encode() + b"Content-Type: application/json\r\nContent-Length: 20\r\n\r\n{")
        assert slow.recv(64).startswith(b"HTTP/1.1 408")
    assert control.calls == []


def test_the_token_is_compared_in_constant_time(shared_site: Site, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return False

    monkeypatch.setattr("rollplex_coordinator.http.guard.hmac.compare_digest", compare)
    answer = httpx.get(f"{shared_site.server.url}/status", headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 401
    assert compared == [(token.encode(), token.encode())]


def test_the_token_is_in_no_log_and_nothing_is_written_to_stdout(
    client: httpx.Client,
    control: FakeControl,
    token: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.NOTSET)
    control.error = ZeroDivisionError("a bug")
    for path in ("/status", "/nowhere", "/iterations/abc"):
        client.get(path)
    client.post("/stop", content=b"{", headers=JSON)
    client.post("/stop", content=b"{}", headers={"Host": "evil.example"})
    assert "a bug" in caplog.text
    assert token not in caplog.text
    written = capfd.readouterr()
    assert written.out == ""
    assert token not in written.err


async def call(guard: Guard, scope: dict[str, Any]) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is to be read")

    await guard(scope, receive, send)
    return sent


def test_a_websocket_is_closed_before_it_opens(token: str) -> None:
    async def app(*_: object) -> None:
        raise AssertionError("the app must not see it")

    guard = Guard(app, token=token, hosts=[], count=lambda *_: None)
    assert asyncio.run(call(guard, {"type": "websocket", "path": "/healthz", "headers": []})) == [
        {"type": "websocket.close", "code": 1008}
    ]


@pytest.mark.parametrize(
    ("allowed", "host"), [("fd00::1", "[fd00::1]:80"), ("[fd00::1]", "[FD00::1]"), ("A_b.c", "a_b.c")]
)
def test_an_allowed_host_may_be_a_name_or_an_address(allowed: str, host: str, token: str) -> None:
    async def app(*_: object) -> None:
        raise AssertionError("the app must not see it")

    guard = Guard(app, token=token, hosts=[allowed], count=lambda *_: None)
    scope = {"type": "http", "method": "GET", "path": "/status", "headers": [(b"host", host.encode())]}
    assert asyncio.run(call(guard, scope))[0]["status"] == 401, "for want of a token, not for its host"


@pytest.mark.parametrize("host", ["*", "*.example", "a b", "", "host:80", "http://host", "[::1"])
def test_an_allowed_host_must_be_a_plain_name(host: str, token: str) -> None:
    with pytest.raises(ConfigError, match="an allowed host must be a plain name"):
        Guard(FastAPI(), token=token, hosts=[host], count=lambda *_: None)
