"""The worker's message thread.

             main thread                     message thread                       coordinator
    inbox.get() ◄── instruction ────── decode, answer Received ◄──── DEALER ──── ROUTER
    send(reply) ─── encode ──────────► out queue, woken by eventfd ─ DEALER ───►
                                       Alive(progress) every second ─────────────►

    waits for: a frame, a reply from the main thread, or the next second.   unblocked by: any of them, or stop().

Because this thread answers `Received` while the main thread computes, a lost message is noticed within the
acknowledgement deadline, and `progress` tells a long unit from a hung one. Knows nothing of what instructions mean.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from typing import Any

import zmq

from rollplex.errors import RollplexError
from rollplex.protocol.codec import CHANNELS, MAX_FRAME_BYTES
from rollplex.protocol.common import Alive, Leave, Received
from rollplex.protocol.handshake import Hello, Refused, decode_answer, encode_handshake, identity

LINGER_MS = 2_000
LAST_WORDS_S = 30.0
"""What a process that ends waits for a coordinator that is too busy to let it in and hear it."""


class CoordinatorGone(RollplexError):  # noqa: N818 - an event as much as an error
    """The coordinator's process ended, or its sockets closed."""


class MessageThread(threading.Thread):
    """Owns the DEALER socket. Instructions and problems arrive in `inbox`."""

    def __init__(self, endpoint: str, hello: Hello, alive_every_s: float) -> None:
        super().__init__(name="messages", daemon=True)
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.progress = 0
        self.starting = True
        """The main thread still imports and builds: it holds nothing, so a Leave ends the process at once."""
        self._endpoint = endpoint
        self._hello = hello
        self._alive_every_s = alive_every_s
        self._channel = CHANNELS[hello.role]
        self._welcome = False
        self._out: deque[bytes] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False

    def send(self, message: Any) -> None:
        """Queue a message; safe from any thread."""
        self._out.append(self._channel.from_worker.encode(message))
        os.eventfd_write(self._wake, 1)

    def reply(self, message: Any) -> None:
        """`send` what the work has brought forth: progress."""
        self.progress += 1
        self.send(message)

    def stop(self) -> bool:
        """Send what is queued, then end; the socket lingers for at most two seconds.

        Returns:
            Whether it has ended: False if the coordinator has not taken what is queued within LAST_WORDS_S.
        """
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self.join(timeout=LAST_WORDS_S)
        return not self.is_alive()

    def run(self) -> None:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, identity(self._hello.role, self._hello.device, self._hello.incarnation))
        dealer.setsockopt(zmq.LINGER, LINGER_MS)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        dealer.connect(self._endpoint)
        dealer.send(encode_handshake(self._hello))
        try:
            self._loop(dealer)
        except Exception as error:  # noqa: BLE001 - outer loop of the thread: the main thread must hear of it
            self.inbox.put(error)
        finally:
            dealer.close()
            context.term()

    def _loop(self, dealer: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        next_alive = time.monotonic() + self._alive_every_s
        while True:
            wait_ms = int(max(0.0, next_alive - time.monotonic()) * 1000) if self._welcome else None
            ready = dict(poller.poll(wait_ms))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if dealer in ready:
                self._receive(dealer)
            while self._out and self._welcome:
                dealer.send(self._out.popleft())
            if self._welcome and time.monotonic() >= next_alive:
                next_alive = time.monotonic() + self._alive_every_s
                dealer.send(self._channel.from_worker.encode(Alive(progress=self.progress)))
            if self._stopping and not self._out:
                return

    def _receive(self, dealer: zmq.Socket[bytes]) -> None:
        frames = dealer.recv_multipart()
        if not self._welcome:
            answer = decode_answer(b"".join(frames))
            if isinstance(answer, Refused):
                raise answer.error()
            self._welcome = True
            return
        message = self._channel.to_worker.decode_frames(frames)
        if isinstance(message, Leave) and self.starting:
            os._exit(0)
        if not isinstance(message, Leave):
            dealer.send(self._channel.from_worker.encode(Received(cause=message.cause)))
        self.inbox.put(message)
