"""Frames with descriptors: what arrives whole, what is refused, and that no descriptor is ever lost."""

from __future__ import annotations

import array
import os
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from rollplex.errors import ProtocolError, SegmentError, WaitError
from rollplex.memory.fds import MAX_FDS, recv, send

Pair = tuple[socket.socket, socket.socket]
LONG_S = 20.0
SHORT_S = 0.05


@pytest.fixture(autouse=True)
def _no_descriptor_is_lost(open_fds: Callable[[], set[str]]) -> Iterator[None]:
    """Before `pair` is opened and after it is closed."""
    before = open_fds()
    yield
    assert open_fds() == before


def head(num_bytes: int, num_fds: int, magic: bytes = b"RXFD") -> bytes:
    return struct.pack("<4sII", magic, num_bytes, num_fds)


def raw(sock: socket.socket, content: bytes, num_fds: int = 0) -> None:
    """Bytes with descriptors of /dev/null, as a peer that does not use `send` might."""
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(num_fds)]
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    assert sock.sendmsg([content], rights) == len(content)
    for fd in fds:
        os.close(fd)


def close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)


def test_frames_arrive_in_order_with_their_descriptors(pair: Pair) -> None:
    reader, writer = os.pipe()
    send(pair[0], b"first", [], LONG_S)
    send(pair[0], b"", [reader], LONG_S)
    send(pair[0], b"third", [writer, reader], LONG_S)
    assert recv(pair[1], LONG_S, 5, 0) == (b"first", ())
    payload, one = recv(pair[1], LONG_S, 5, 2)
    assert (payload, len(one)) == (b"", 1)
    payload, two = recv(pair[1], LONG_S, 5, 2)
    assert (payload, len(two)) == (b"third", 2)
    os.write(two[0], b"through the pipe")
    assert os.read(one[0], 100) == b"through the pipe"
    close_all((*one, *two, reader, writer))


def test_received_descriptors_do_not_pass_to_child_programs(pair: Pair) -> None:
    raw(pair[0], head(0, 1), 1)
    _, (fd,) = recv(pair[1], LONG_S, 0, 1)
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_the_most_that_linux_carries_arrives_and_more_is_refused_before_it_is_sent(pair: Pair) -> None:
    raw(pair[0], head(3, MAX_FDS) + b"all", MAX_FDS)
    payload, fds = recv(pair[1], LONG_S, 3, MAX_FDS)
    assert (payload, len(fds)) == (b"all", MAX_FDS)
    with pytest.raises(SegmentError, match="too many"):
        send(pair[0], b"", [fds[0]] * (MAX_FDS + 1), LONG_S)
    close_all(fds)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_payload_larger_than_the_socket_arrives_whole(pair: Pair, blocking: bool) -> None:
    payload = os.urandom(3 * 2**20 + 1)
    null = os.open(os.devnull, os.O_RDONLY)
    for sock in pair:
        sock.setblocking(blocking)
    sender = threading.Thread(target=send, args=(pair[0], payload, [null], LONG_S))
    sender.start()
    got, fds = recv(pair[1], LONG_S, len(payload), 1)
    sender.join(LONG_S)
    assert got == payload
    assert len(fds) == 1
    close_all((*fds, null))


def test_the_end_between_frames_is_end_of_file(pair: Pair) -> None:
    send(pair[0], b"last", [], LONG_S)
    pair[0].close()
    assert recv(pair[1], LONG_S, 4, 0) == (b"last", ())
    for _ in range(2):
        with pytest.raises(EOFError):
            recv(pair[1], LONG_S, 4, 0)


@pytest.mark.parametrize("num_fds", [0, 1])
@pytest.mark.parametrize("cut", [1, 4, 11, 12, 15])
def test_the_end_inside_a_frame_is_a_protocol_error(pair: Pair, cut: int, num_fds: int) -> None:
    raw(pair[0], (head(4, num_fds) + b"data")[:cut], num_fds)
    pair[0].close()
    with pytest.raises(ProtocolError, match="cut off"):
        recv(pair[1], LONG_S, 4, 1)


def test_a_peer_that_was_reset_is_end_of_file(pair: Pair) -> None:
    raw(pair[1], b"never read")
    pair[0].close()
    with pytest.raises(EOFError):
        recv(pair[1], LONG_S, 4, 0)


def test_sending_to_a_closed_peer_is_end_of_file(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(EOFError):
        send(pair[0], b"anyone?", [], LONG_S)


@pytest.mark.parametrize("num_fds", [0, 1])
def test_a_frame_that_says_it_is_too_long_is_refused_unread(pair: Pair, num_fds: int) -> None:
    raw(pair[0], head(2**32 - 1, num_fds), num_fds)
    with pytest.raises(ProtocolError, match="too long") as caught:
        recv(pair[1], LONG_S, 100, 1)
    assert caught.value.got == "4294967295 bytes"
    assert caught.value.needed == "at most 100"


def test_what_is_no_frame_is_refused(pair: Pair) -> None:
    raw(pair[0], head(4, 0, magic=b"HTTP") + b"data", 1)
    with pytest.raises(ProtocolError, match="HTTP"):
        recv(pair[1], LONG_S, 100, 1)


@pytest.mark.parametrize(
    ("said", "brought", "taken"),
    [(0, 1, 1), (1, 2, 4), (2, 1, 4), (1, 0, 1), (1, 1, 0), (0, 1, 0), (3, 3, 2), (3, 3, 1), (1, 9, 1), (9, 9, 1)],
)
def test_other_descriptors_than_said_or_allowed_are_closed_and_refused(
    pair: Pair, said: int, brought: int, taken: int
) -> None:
    raw(pair[0], head(4, said) + b"data", brought)
    with pytest.raises(ProtocolError, match="descriptors"):
        recv(pair[1], LONG_S, 100, taken)


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_descriptors_that_come_with_the_payload_are_refused_at_once(pair: Pair, allowed: int) -> None:
    raw(pair[0], head(4, min(allowed, 1)), min(allowed, 1))
    raw(pair[0], b"da", 1)
    with pytest.raises(ProtocolError, match="descriptors"):
        recv(pair[1], LONG_S, 100, allowed)


@pytest.mark.parametrize(("first", "then"), [(2, 0), (1, 1), (1, 2), (0, 2)])
def test_descriptors_with_parts_of_a_head_are_refused_at_the_first_too_many(pair: Pair, first: int, then: int) -> None:
    raw(pair[0], head(4, 1)[:5], first)
    raw(pair[0], head(4, 1)[5:9], then)
    with pytest.raises(ProtocolError, match="descriptors"):
        recv(pair[1], LONG_S, 100, 1)


def test_a_full_descriptor_table_is_refused_and_leaves_nothing(pair: Pair) -> None:
    raw(pair[0], head(0, 3), 3)
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe + 1, old[1]))  # room for one more
    try:
        with pytest.raises(ProtocolError, match="ulimit -n"):
            recv(pair[1], LONG_S, 0, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)


@pytest.mark.parametrize("part", [b"", head(4, 0)[:5], head(4, 0) + b"dat", head(4, 1)])
def test_a_frame_that_does_not_come_ends_the_wait_at_the_deadline(pair: Pair, part: bytes) -> None:
    if part:
        raw(pair[0], part, 1 if part == head(4, 1) else 0)
    with pytest.raises(WaitError) as caught:
        recv(pair[1], SHORT_S, 4, 1)
    assert caught.value.needed == "a frame"
    assert str(SHORT_S) in caught.value.got


def test_a_peer_that_trickles_does_not_extend_the_deadline(pair: Pair) -> None:
    stop = threading.Event()

    def trickle() -> None:
        raw(pair[0], head(2**20, 0))
        while not stop.wait(0.01):
            raw(pair[0], b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        with pytest.raises(WaitError):
            recv(pair[1], 0.2, 2**20, 0)
    finally:
        stop.set()
        thread.join(LONG_S)


def test_a_peer_that_does_not_read_ends_the_wait_at_the_deadline(pair: Pair) -> None:
    with pytest.raises(WaitError, match="room"):
        send(pair[0], bytes(8 * 2**20), [], SHORT_S)


def test_a_descriptor_that_is_not_open_cannot_be_sent(pair: Pair) -> None:
    closed = os.dup(0)
    os.close(closed)
    with pytest.raises(SegmentError, match="not open"):
        send(pair[0], b"", [closed], LONG_S)


def test_a_socket_with_a_timeout_of_its_own_is_our_mistake(pair: Pair) -> None:
    pair[0].settimeout(1.0)
    with pytest.raises(AssertionError, match="time-out"):
        recv(pair[0], LONG_S, 0, 0)
    with pytest.raises(AssertionError, match="time-out"):
        send(pair[0], b"", [], LONG_S)
