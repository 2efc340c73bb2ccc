"""Worker and coordinator over real sockets: who is let in, what arrives, what an end looks like."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from rollplex.errors import ProtocolError, SegmentError, WaitError
from rollplex.memory.fds import send
from rollplex.memory.segment import backend
from rollplex.protocol.claim import Claim
from rollplex.protocol.codec import TO_HOLDER
from rollplex.protocol.common import Alive, Device, DigestReply, DigestRequest, Kind, Received, Role, SegmentRef
from rollplex.protocol.handshake import encode_handshake, identity, make_hello
from rollplex.protocol.holder import Fetch
from rollplex.worker import connection
from rollplex.worker.connection import ToldToLeave, connect_stream, watch
from rollplex.worker.messages import CoordinatorGone, MessageThread
from rollplex.worker.options import WorkerOptions
from rollplex.worker.segments import Segments
from rollplex_coordinator.memory.holder import Holder
from rollplex_coordinator.processes.hub import Arrived, Event, Gone, Hub, Joined

DEADLINE_S = 10.0


def options(run_dir: Path, **changes: Any) -> WorkerOptions:
    given = WorkerOptions(
        role=Role.ROLLOUT, run_dir=run_dir, device=Device(), incarnation=1, connect_deadline_s=DEADLINE_S
    )
    return msgspec.structs.replace(given, **changes)


def while_polling(hub: Hub, function: Callable[[], Any]) -> Any:
    """Run `function` in a thread, as a worker would, while the hub turns here."""
    result = ThreadPoolExecutor(max_workers=1).submit(function)
    end = time.monotonic() + DEADLINE_S
    while not result.done() and time.monotonic() < end:
        hub.poll(0.02)
    return result.result(0)


def await_events(hub: Hub, wanted: Callable[[list[Event]], bool]) -> list[Event]:
    events: list[Event] = []
    end = time.monotonic() + DEADLINE_S
    while not wanted(events):
        assert time.monotonic() < end, events
        events += hub.poll(0.05)
    return events


@contextmanager
def joined(hub: Hub, run_dir: Path) -> Iterator[tuple[MessageThread, socket.socket, Joined]]:
    """A worker whose message thread runs."""
    found, stream, hello, welcome = while_polling(hub, lambda: connect_stream(options(run_dir)))
    messages = MessageThread(found.control_endpoint, hello, welcome.alive_every_s)
    messages.starting = False
    messages.start()
    events = await_events(hub, lambda e: any(isinstance(x, Joined) for x in e))
    try:
        yield messages, stream, next(e for e in events if isinstance(e, Joined))
    finally:
        messages.stop()
        stream.close()


def test_an_instruction_is_acknowledged_before_it_is_carried_out(hub: Hub, claimed: Claim) -> None:
    with joined(hub, claimed.run_dir.path) as (messages, _, join):
        hub.send(join.peer, DigestRequest(cause=7))
        events = await_events(hub, lambda e: any(isinstance(x, Arrived) and x.message == Received(cause=7) for x in e))
        assert not any(isinstance(x, Arrived) and isinstance(x.message, DigestReply) for x in events)
        assert messages.inbox.get(timeout=DEADLINE_S) == DigestRequest(cause=7)
        reply = DigestReply(cause=7, version=1, digest="d")
        messages.send(reply)
        await_events(hub, lambda e: any(isinstance(x, Arrived) and x.message == reply for x in e))


def test_a_worker_says_that_it_is_alive_and_how_far_it_got(hub: Hub, claimed: Claim) -> None:
    with joined(hub, claimed.run_dir.path) as (messages, _, _join):
        messages.progress = 5
        await_events(hub, lambda e: any(isinstance(x, Arrived) and x.message == Alive(progress=5) for x in e))


def test_the_end_of_a_worker_is_seen_at_once(hub: Hub, claimed: Claim) -> None:
    with joined(hub, claimed.run_dir.path) as (_, stream, join):
        stream.close()
        events = await_events(hub, lambda e: any(isinstance(x, Gone) for x in e))
        assert next(x for x in events if isinstance(x, Gone)).peer == join.peer
        with pytest.raises(ProtocolError, match="cannot send"):
            hub.send(msgspec.structs.replace(join.peer, incarnation=99), DigestRequest(cause=1))


def test_the_end_of_the_coordinator_is_seen_at_once(hub: Hub, claimed: Claim) -> None:
    with joined(hub, claimed.run_dir.path) as (_, stream, join):
        ended = threading.Event()
        watch(stream, ended.set)
        assert not ended.wait(0.1)
        hub.disconnect(join.peer)
        assert ended.wait(DEADLINE_S)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"role": Role.PREFIX}, "role"),
        ({"device": Device(index=3)}, "role"),
        ({"incarnation": 2}, "incarnation"),
    ],
)
def test_a_worker_that_nobody_expects_is_refused_with_both_values(
    hub: Hub, claimed: Claim, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ProtocolError, match=f"refused the connection \\({reason}\\)"):
        while_polling(hub, lambda: connect_stream(options(claimed.run_dir.path, **change)))


def test_a_second_worker_in_the_same_place_is_refused(hub: Hub, claimed: Claim) -> None:
    with (
        joined(hub, claimed.run_dir.path),
        pytest.raises(ProtocolError, match=r"refused the connection \(identity\)"),
    ):
        while_polling(hub, lambda: connect_stream(options(claimed.run_dir.path)))


def test_no_coordinator_is_an_error_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(WaitError, match="no coordinator answers"):
        connect_stream(options(tmp_path / "nowhere", connect_deadline_s=0.2))


def test_a_coordinator_that_is_busy_is_waited_for(hub: Hub, claimed: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FRAME_DEADLINE_S", 0.1)
    with ThreadPoolExecutor(max_workers=1) as pool:
        coming = pool.submit(connect_stream, options(claimed.run_dir.path))
        with pytest.raises(TimeoutError):
            coming.result(0.5)
        while not coming.done():
            hub.poll(0.02)
    coming.result()[1].close()


def test_a_coordinator_that_never_answers_is_an_error_at_the_deadline(hub: Hub, claimed: Claim) -> None:
    with pytest.raises(WaitError, match="no coordinator answers; got it has not answered the hello after 0 s"):
        connect_stream(options(claimed.run_dir.path, connect_deadline_s=0.3))


def test_a_worker_that_waits_for_an_answer_can_be_told_to_leave(hub: Hub, claimed: Claim) -> None:
    asked = iter([False, False, True, True])
    with pytest.raises(ToldToLeave):
        connect_stream(options(claimed.run_dir.path), lambda: next(asked))


def test_a_stranger_on_the_message_socket_is_not_heard(hub: Hub, claimed: Claim) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.IDENTITY, b"rollout/0:0/1")
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(claimed.run_dir.control_endpoint)
    for frame in (b"", b"RPLX", b"\xff" * 100, b"\x93" * 1000):
        stranger.send(frame)
    assert [event for _ in range(5) for event in hub.poll(0.05)] == []
    stranger.close()
    context.term()


def test_a_worker_that_ends_before_its_hello_is_read_does_not_disturb_the_coordinator(hub: Hub, claimed: Claim) -> None:
    run_dir, stream, hello, _ = while_polling(hub, lambda: connect_stream(options(claimed.run_dir.path)))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, identity(hello.role, hello.device, hello.incarnation))
    dealer.connect(run_dir.control_endpoint)
    dealer.send(encode_handshake(hello))
    assert hub._router.poll(int(DEADLINE_S * 1000))  # it has arrived, unread
    dealer.close()
    context.term()
    stream.close()
    time.sleep(0.1)  # the router's thread sees the end of the connection; nothing outside shows that
    events = await_events(hub, lambda e: any(isinstance(x, Gone) for x in e))
    assert not any(isinstance(x, Joined) for x in events)


def test_a_worker_that_ends_before_it_is_let_in_leaves_its_place_free(hub: Hub, claimed: Claim) -> None:
    first = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    first.connect(str(claimed.run_dir.segments_socket))
    send(first, encode_handshake(make_hello(Role.ROLLOUT, Device(), 1, claimed.secret)), (), DEADLINE_S)
    first.close()
    with joined(hub, claimed.run_dir.path) as (_, _stream, join):
        assert join.peer.role is Role.ROLLOUT


def test_a_worker_that_ends_before_it_has_its_descriptor_is_gone(hub: Hub, claimed: Claim, holder: Holder) -> None:
    with joined(hub, claimed.run_dir.path) as (_, stream, join):
        ref = holder.create(Kind.INPUTS, 4096, lease=1)
        send(stream, TO_HOLDER.encode(Fetch(segment=ref.segment)), (), DEADLINE_S)
        stream.close()
        assert Gone(peer=join.peer) in await_events(hub, lambda e: any(isinstance(x, Gone) for x in e))


def test_malformed_frames_of_a_worker_are_dropped_and_at_last_cut_it_off(hub: Hub, claimed: Claim) -> None:
    with joined(hub, claimed.run_dir.path) as (messages, stream, _join):
        ended = threading.Event()
        watch(stream, ended.set)
        for _ in range(10):
            messages._out.append(b"\xc1not a message")
        messages.send(Received(cause=1))
        end = time.monotonic() + DEADLINE_S
        while not ended.is_set() and time.monotonic() < end:
            hub.poll(0.05)
        assert ended.is_set()


def test_a_segment_is_fetched_mapped_once_and_given_back(hub: Hub, claimed: Claim, holder: Holder) -> None:
    with joined(hub, claimed.run_dir.path) as (_, stream, _join):
        segments = Segments(stream, backend, "test-run")
        ref = holder.create(Kind.INPUTS, 4096, lease=1)
        mapping = while_polling(hub, lambda: segments.attach(ref))
        mapping.write(0, b"hello")
        assert segments.attach(ref) is mapping
        assert segments.attached == {ref.segment: 4096}
        segments.detach(ref.segment)
        segments.detach(ref.segment)
        again = while_polling(hub, lambda: segments.attach(ref))
        assert again.read(0, 5) == b"hello"
        segments.detach(ref.segment)


def test_a_segment_that_does_not_exist_or_is_another_is_refused(hub: Hub, claimed: Claim, holder: Holder) -> None:
    with joined(hub, claimed.run_dir.path) as (_, stream, _join):
        segments = Segments(stream, backend, "test-run")
        ref = holder.create(Kind.INPUTS, 4096, lease=1)
        for wrong in (
            SegmentRef(segment=99, kind=Kind.INPUTS, size_bytes=4096),
            SegmentRef(segment=ref.segment, kind=Kind.GRADIENTS, size_bytes=4096),
            SegmentRef(segment=ref.segment, kind=Kind.INPUTS, size_bytes=8192),
        ):
            with pytest.raises(SegmentError, match="cannot attach a segment"):
                while_polling(hub, partial(segments.attach, wrong))
        assert segments.attached == {}


def test_a_worker_that_asks_for_a_segment_hears_that_the_coordinator_has_ended(hub: Hub, claimed: Claim) -> None:
    with joined(hub, claimed.run_dir.path) as (_, stream, join):
        segments = Segments(stream, backend, "test-run")
        hub.disconnect(join.peer)
        with pytest.raises(CoordinatorGone):
            segments.attach(SegmentRef(segment=1, kind=Kind.INPUTS, size_bytes=4096))
