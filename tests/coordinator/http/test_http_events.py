from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from rollplex.journal.events import IterationStarted, RunEnded, UpdateBegin
from rollplex_coordinator.http.streams import StreamSettings
from support.http_site import Site

MakeSite = Callable[..., "Site"]


def write(site: Site, count: int, rows: int = 1) -> None:
    """So many events, flushed."""
    for _ in range(count):
        step = site.journal.last_id + 1
        site.journal.append(IterationStarted(step=step, version=0, rows=tuple(range(rows))))
    site.journal.flush()


def frames(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """Events and comments of a stream; a comment is under the empty name."""
    frame: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            frame[name] = value
        elif frame:
            yield frame
            frame = {}


@contextmanager
def following(client: httpx.Client, address: str = "/events", **headers: str) -> Iterator[Iterator[dict[str, str]]]:
    with client.stream("GET", address, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        yield frames(answer.iter_lines())


def take(stream: Iterator[dict[str, str]], count: int) -> list[int]:
    """Ids of the next `count` events."""
    ids: list[int] = []
    while len(ids) < count:
        frame = next(stream)
        ids += [int(frame["id"])] if "id" in frame else []
    return ids


def present(client: httpx.Client, address: str = "/events?follow=false", **headers: str) -> list[int]:
    """Ids of everything up to now."""
    with following(client, address, **headers) as stream:
        return [int(frame["id"]) for frame in stream if "id" in frame]


@pytest.fixture
def site(make_site: MakeSite) -> Site:
    return make_site()


@pytest.fixture
def client(site: Site) -> Iterator[httpx.Client]:
    with site.client() as client:
        yield client


def test_a_frame_has_id_type_times_and_the_event(site: Site, client: httpx.Client) -> None:
    site.journal.append_durable(UpdateBegin(step=3, version=2))
    with following(client, "/events?follow=false") as stream:
        first, frame = stream
    assert first == {"retry": "1000"}
    assert (frame["id"], frame["event"]) == ("1", "UpdateBegin")
    data: dict[str, Any] = json.loads(frame["data"])
    assert data["event"] == {"type": "UpdateBegin", "step": 3, "version": 2}
    assert (data["id"], data["step"]) == (1, 3)
    assert data["wall_s"] > 1.7e9
    assert data["monotonic_s"] > 0


def test_a_stream_resumed_by_id_loses_and_repeats_nothing(site: Site, client: httpx.Client) -> None:
    total = 500
    seen: list[int] = []
    batches = iter([1, 7, 8, 30, 3, 51, 100, 200])
    write(site, 1)
    for batch in batches:
        # Resume by header; the address says another place, as a browser's does when it connects again.
        with following(client, "/events?after=0", **{"Last-Event-ID": str(seen[-1])} if seen else {}) as stream:
            write(site, batch)
            seen += take(stream, max(1, batch // 2))
    write(site, total - site.journal.last_id)
    seen += present(client, f"/events?follow=false&after={seen[-1]}")
    assert seen == list(range(1, total + 1))


def test_a_follower_sees_an_event_that_is_written_after_it_came(site: Site, client: httpx.Client) -> None:
    with following(client) as stream:
        assert next(stream) == {"retry": "1000"}
        write(site, 2)
        assert take(stream, 2) == [1, 2]
        site.journal.append(IterationStarted(step=9, version=0, rows=()))
        site.journal.flush()
        assert take(stream, 1) == [3]


def test_without_following_the_stream_ends_at_the_present(site: Site, client: httpx.Client) -> None:
    assert present(client) == []
    write(site, 20)
    assert present(client) == list(range(1, 21))
    assert present(client, "/events?follow=false&after=18") == [19, 20]
    assert present(client, "/events?follow=false&after=20") == []


def test_a_stream_may_begin_with_the_newest_so_many(site: Site, client: httpx.Client) -> None:
    write(site, 6)
    newest = present(client)[-1]
    assert present(client, "/events?last=2&follow=false") == [newest - 1, newest]
    assert present(client, "/events?last=1000&follow=false") == present(client)
    assert present(client, f"/events?last=2&after={newest - 4}&follow=false")[0] == newest - 3
    assert client.get("/events?last=-1&follow=false").status_code == 400


def test_the_present_is_when_the_stream_began(
    site: Site, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(site, 5)
    from rollplex.journal.reader import Reader

    last_id = Reader.last_id
    monkeypatch.setattr(Reader, "last_id", lambda reader: min(last_id(reader), 3))
    assert present(client) == [1, 2, 3]


def test_a_quiet_stream_says_that_it_is_still_there(client: httpx.Client) -> None:
    with following(client) as stream:
        assert next(stream) == {"retry": "1000"}
        assert next(stream) == {"": "still here"}
        assert next(stream) == {"": "still here"}


def test_an_event_of_another_journal_is_refused(site: Site, client: httpx.Client) -> None:
    write(site, 3)
    answer = client.get("/events?after=4")
    assert answer.status_code == 409
    assert answer.json()["error"]["got"] == "event 4"


@pytest.mark.parametrize("last", ["x", "-1", "1.0", "²", str(2**63), "9" * 40])
def test_a_last_event_id_that_is_no_id_is_refused(client: httpx.Client, last: str) -> None:
    answer = client.get("/events", headers={b"Last-Event-ID": last.encode()})
    assert answer.status_code == 400


def test_the_header_goes_before_the_address_as_a_browser_that_connects_again_needs(
    site: Site, client: httpx.Client
) -> None:
    write(site, 5)
    assert present(client, "/events?follow=false&after=1", **{"Last-Event-ID": "3"}) == [4, 5]


def test_an_empty_last_event_id_is_as_none(site: Site, client: httpx.Client) -> None:
    write(site, 2)
    assert present(client, "/events?follow=false&after=1", **{"Last-Event-ID": ""}) == [2]


def test_there_are_only_so_many_streams_and_a_client_that_leaves_makes_room(site: Site, client: httpx.Client) -> None:
    with following(client), following(client), following(client) as third:
        next(third)
        assert client.get("/events").status_code == 503
        assert client.get("/status").status_code == 200
    while client.get("/events?follow=false").status_code != 200:
        pass
    wait_for(lambda: site.app.state.rollplex.streams.open == 0)


def wait_for(condition: Callable[[], bool]) -> None:
    """Until the condition holds, or 10 s are over."""
    pause = threading.Event()
    for _ in range(1_000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen")


def connect_without_reading(site: Site, token: str) -> socket.socket:
    """A client with a small window that asks for the stream and does not read."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.settimeout(20)
    plain.connect(("127.0.0.1", site.server.port))
    plain.sendall(f"GET /events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
    return plain


def test_a_client_that_never_reads_holds_one_batch_and_nobody_up_and_loses_nothing(
    site: Site, client: httpx.Client, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollplex.journal.reader import Reader

    reads: list[int] = []
    rows_after = Reader.rows_after

    def counting(reader: Reader, after: int, limit: int, max_bytes: int = 2**20) -> Any:
        reads.append(after)
        return rows_after(reader, after, limit, max_bytes)

    monkeypatch.setattr(Reader, "rows_after", counting)
    total = 200
    with connect_without_reading(site, token) as idle:
        write(site, total, rows=10_000)  # 60 kB each, 10 MB in all: more than every buffer on the way
        wait_for(lambda: len(reads) > 2)
        previous = -1
        while len(reads) != previous:  # it has come to a stand
            previous = len(reads)
            threading.Event().wait(0.1)
        assert max(reads) < total / 2
        assert client.get("/status").status_code == 200
        site.journal.append_durable(UpdateBegin(step=1, version=0))
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        received = bytearray()
        while b'"UpdateBegin"' not in received[-1_000:]:
            received += idle.recv(2**20)
    assert [int(found) for found in re.findall(rb"^id: ([0-9]+)$", received, re.MULTILINE)] == list(range(1, total + 2))


def test_a_stream_reads_no_more_than_its_batch_at_once(make_site: MakeSite) -> None:
    site = make_site(StreamSettings(poll_s=0.01, batch_rows=100, batch_bytes=1_000))
    write(site, 30, rows=50)
    with site.client() as client, client.stream("GET", "/events?follow=false") as answer:
        chunks = list(answer.iter_raw())
    assert max(map(len, chunks)) < 4_000
    assert len([line for line in b"".join(chunks).split(b"\n") if line.startswith(b"id: ")]) == 30


def test_at_the_end_a_stream_sends_what_is_left_and_ends(site: Site, client: httpx.Client) -> None:
    with following(client) as stream:
        assert next(stream) == {"retry": "1000"}
        write(site, 40)
        site.journal.append(RunEnded(run="r1", exit_code=0, reason="stopped over HTTP"))
        site.journal.flush()
        stopping = threading.Thread(target=site.server.stop)
        stopping.start()
        got = [frame for frame in stream if "id" in frame]
        stopping.join(10)
    assert [int(frame["id"]) for frame in got] == list(range(1, 42))
    assert got[-1]["event"] == "RunEnded"
    assert not stopping.is_alive()
