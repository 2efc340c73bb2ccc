"""The message thread alone, against a bare ROUTER that plays the coordinator."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

from rollplex.errors import ProtocolError
from rollplex.protocol.codec import CHANNELS
from rollplex.protocol.common import Alive, Device, DigestReply, DigestRequest, Leave, Received, Role
from rollplex.protocol.handshake import (
    SECRET_BYTES,
    Hello,
    Reason,
    Refused,
    Welcome,
    decode_hello,
    encode_handshake,
    make_hello,
)
from rollplex.worker import messages as messages_module
from rollplex.worker.messages import LINGER_MS, MessageThread

DEADLINE_S = 20.0
NEVER_S = 3600.0
CHANNEL = CHANNELS[Role.PREFIX]
WELCOME = Welcome(run_id="r", alive_every_s=1.0, received_within_s=1.0, grace_s=1.0)


class Router:
    """The coordinator's end: frames in, frames out."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        self._socket.bind(endpoint)

    def frames(self) -> tuple[bytes, bytes]:
        """Sender and content of the next message."""
        sender, content = self._socket.recv_multipart()
        return sender, content

    def next(self) -> Any:
        """The next typed message."""
        return CHANNEL.from_worker.decode(self.frames()[1])

    def until(self, wanted: Callable[[Any], bool]) -> list[Any]:
        """Messages up to the wanted one."""
        seen = [self.next()]
        while not wanted(seen[-1]):
            seen.append(self.next())
        return seen

    def silent(self) -> bool:
        return not self._socket.poll(50)

    def answer(self, *frames: bytes) -> None:
        self._socket.send_multipart([b"prefix/0:1/3", *frames])

    def tell(self, message: Any) -> None:
        self.answer(CHANNEL.to_worker.encode(message))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    router = Router(f"ipc://{tmp_path}/s")
    yield router
    router.close()


def hello() -> Hello:
    return make_hello(Role.PREFIX, Device(index=1), 3, b"s" * SECRET_BYTES)


@pytest.fixture
def thread(router: Router) -> Iterator[MessageThread]:
    """Of a worker that is done with starting; says that it is alive once an hour."""
    thread = MessageThread(router.endpoint, hello(), NEVER_S)
    thread.starting = False
    thread.start()
    yield thread
    thread.stop()


@pytest.fixture
def welcome(router: Router, thread: MessageThread) -> MessageThread:
    """A thread that was let in."""
    router.frames()
    router.answer(encode_handshake(WELCOME))
    return thread


def test_its_first_frame_says_who_it_is_under_the_identity_that_goes_with_it(
    router: Router, thread: MessageThread
) -> None:
    sender, content = router.frames()
    assert sender == b"prefix/0:1/3"
    assert decode_hello(content) == hello()
    router.answer(encode_handshake(WELCOME))


def test_nothing_is_sent_before_the_welcome_and_everything_after_it(router: Router, thread: MessageThread) -> None:
    router.frames()
    messages = [DigestReply(cause=n, version=1, digest="d") for n in range(3)]
    for message in messages:
        thread.send(message)
    assert router.silent()
    router.answer(encode_handshake(WELCOME))
    assert [router.next() for _ in messages] == messages


def test_a_refusal_reaches_the_main_thread(router: Router, thread: MessageThread) -> None:
    router.frames()
    router.answer(encode_handshake(Refused(reason=Reason.ROLE, ours="none", yours="prefix", do="Go home.")))
    error = thread.inbox.get(timeout=DEADLINE_S)
    assert isinstance(error, ProtocolError)
    assert "Go home." in str(error)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_instructions_are_acknowledged_at_once_and_queued_in_order(router: Router, welcome: MessageThread) -> None:
    for cause in (4, 5, 6):
        router.tell(DigestRequest(cause=cause))
    assert [router.next() for _ in range(3)] == [Received(cause=cause) for cause in (4, 5, 6)]
    assert [welcome.inbox.get(timeout=DEADLINE_S).cause for _ in range(3)] == [4, 5, 6]


def test_leaving_is_an_instruction_without_acknowledgement(router: Router, welcome: MessageThread) -> None:
    router.tell(Leave(reason="done"))
    assert welcome.inbox.get(timeout=DEADLINE_S) == Leave(reason="done")
    assert router.silent()


def test_signs_of_life_carry_the_progress_of_the_work_and_answers_are_progress(router: Router) -> None:
    thread = MessageThread(router.endpoint, hello(), 0.01)
    thread.starting = False
    thread.start()
    try:
        router.frames()
        router.answer(encode_handshake(WELCOME))
        assert router.next() == Alive(progress=0)
        thread.reply(DigestReply(cause=1, version=1, digest="d"))
        router.until(lambda message: isinstance(message, DigestReply))
        assert router.until(lambda message: message == Alive(progress=1))
        thread.send(DigestReply(cause=2, version=1, digest="d"))
        router.until(lambda message: isinstance(message, DigestReply))
        assert router.next() == Alive(progress=1)
    finally:
        thread.stop()


@pytest.mark.parametrize("frames", [[b"\xc1"], [b""], [b"a", b"b"]], ids=["no message", "empty", "two parts"])
def test_what_is_no_message_ends_the_thread_and_the_main_thread_hears_why(
    router: Router, welcome: MessageThread, frames: list[bytes]
) -> None:
    router.answer(*frames)
    assert isinstance(welcome.inbox.get(timeout=DEADLINE_S), ProtocolError)
    welcome.join(DEADLINE_S)
    assert not welcome.is_alive()


def test_a_message_of_another_channel_is_refused_where_it_is_sent(welcome: MessageThread) -> None:
    with pytest.raises(ProtocolError, match="does not belong to this channel"):
        welcome.send(DigestRequest(cause=1))


def test_the_end_waits_for_what_is_queued(router: Router, welcome: MessageThread) -> None:
    messages = [DigestReply(cause=n, version=1, digest="d" * 1000) for n in range(200)]
    for message in messages:
        welcome.send(message)
    welcome.stop()
    assert not welcome.is_alive()
    assert [router.next() for _ in messages] == messages


def test_the_end_waits_for_a_coordinator_that_lets_nobody_in_for_seconds(router: Router, thread: MessageThread) -> None:
    router.frames()
    words = DigestReply(cause=1, version=1, digest="the last")
    thread.send(words)
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(thread.stop)
        with pytest.raises(TimeoutError):
            stopped.result(LINGER_MS / 1000 + 1.5)
        router.answer(encode_handshake(WELCOME))
        assert router.next() == words
        assert stopped.result(DEADLINE_S)


def test_an_end_whose_words_nobody_hears_is_told(
    router: Router, thread: MessageThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages_module, "LAST_WORDS_S", 0.1)
    router.frames()
    thread.send(DigestReply(cause=1, version=1, digest="the last"))
    assert not thread.stop()
    router.answer(encode_handshake(WELCOME))


def test_an_end_without_a_coordinator_comes_too(tmp_path: Path) -> None:
    thread = MessageThread(f"ipc://{tmp_path}/nobody", hello(), NEVER_S)
    thread.start()
    start_s = time.monotonic()
    thread.stop()
    assert time.monotonic() - start_s < DEADLINE_S


STARTING = """
import sys, time
from rollplex.protocol.common import Device, Role
from rollplex.protocol.handshake import make_hello
from rollplex.worker.messages import MessageThread
MessageThread(sys.argv[1], make_hello(Role.PREFIX, Device(index=1), 3, b"s" * 32), 3600.0).start()
time.sleep(600)
"""


def test_whoever_is_told_to_leave_while_it_starts_leaves_at_once(router: Router) -> None:
    process = subprocess.Popen([sys.executable, "-c", STARTING, router.endpoint], env={**os.environ})
    try:
        router.frames()
        router.answer(encode_handshake(WELCOME))
        router.tell(Leave(reason="never mind"))
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait(DEADLINE_S)
