"""The coordinator's ends of one worker's two connections, on a bench: sees everything, judges nothing.

Owns sockets, handshake and descriptors, for a single worker at a time. It keeps what came, with the time, also what a
coordinator would drop. Does not know what a message means, nor what should have come.

    turn() waits for: a frame, a connection, the end of the stream, or the timeout.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import zmq
from msgspec import Struct

from rollplex.errors import ProtocolError, RollplexError
from rollplex.memory.fds import recv, send
from rollplex.protocol.claim import Claim
from rollplex.protocol.codec import CHANNELS, FROM_HOLDER, MAX_FRAME_BYTES, MAX_HOLDER_FRAME_BYTES, TO_HOLDER
from rollplex.protocol.common import Device, Role, SegmentRef
from rollplex.protocol.handshake import (
    Expected,
    Hello,
    Refused,
    Welcome,
    check_hello,
    decode_hello,
    encode_handshake,
    identity,
)
from rollplex.protocol.holder import Descriptor, NoSuchSegment

STREAM_S = 5.0
DEVICE = Device()
INCARNATION = 1


class Heard(Struct, frozen=True, kw_only=True):
    """A message of the worker, and when it was read (CLOCK_MONOTONIC seconds)."""

    message: Any
    at_s: float


class Line:
    """One run directory's sockets.

    Args:
        claim: the run directory.
        segments: by number, what may be fetched: descriptor and reference.
        refusals: sent to the first hellos on the stream, one each, whatever they say.
    """

    def __init__(
        self,
        claim: Claim,
        role: Role,
        welcome: Welcome,
        segments: Mapping[int, tuple[int, SegmentRef]],
        refusals: Sequence[Refused] = (),
    ) -> None:
        self.heard: list[Heard] = []
        self.bad_frames: list[str] = []
        """What no coordinator could have read, and why."""
        self.hellos: list[Hello] = []
        """On the stream."""
        self.wrong_hello: Refused | None = None
        """What a coordinator would have answered."""
        self.joined_s: float | None = None
        self.ended_s: float | None = None
        """When the stream ended after it had joined."""
        self._role, self._channel = role, CHANNELS[role]
        self._identity = identity(role, DEVICE, INCARNATION)
        self._expected = Expected(role=role, device=DEVICE, secret=claim.secret, incarnation=INCARNATION)
        self._welcome = encode_handshake(welcome)
        self._segments = segments
        self._refusals = list(refusals)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._router.setsockopt(zmq.SNDTIMEO, int(STREAM_S * 1000))
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(claim.run_dir.control_endpoint)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(claim.run_dir.segments_socket))
        self._listener.listen(8)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._listener.fileno(), zmq.POLLIN)
        self._streams: dict[int, socket.socket] = {}
        self._admitted: socket.socket | None = None

    def send(self, message: Any) -> None:
        """Send one message.

        Raises:
            ProtocolError: the worker's message socket is gone, or does not read.
        """
        try:
            self._router.send_multipart([self._identity, self._channel.to_worker.encode(message)])
        except zmq.ZMQError as error:
            raise ProtocolError("cannot send a message", got=str(error), needed="a peer that reads") from error

    def turn(self, timeout_s: float) -> None:
        """Take in what has come, or comes within the timeout."""
        for source, _ in self._poller.poll(max(0, math.ceil(timeout_s * 1000))):
            if source is self._router:
                self._receive_all()
            elif source == self._listener.fileno():
                stream, _address = self._listener.accept()
                self._streams[stream.fileno()] = stream
                self._poller.register(stream.fileno(), zmq.POLLIN)
            elif isinstance(source, int) and source in self._streams:
                self._serve(self._streams[source])

    def end_stream(self) -> None:
        """What a worker sees of its coordinator's death."""
        if self._admitted is not None:
            self._drop(self._admitted)

    def close(self) -> None:
        """Close everything."""
        for stream in list(self._streams.values()):
            self._drop(stream)
        self._listener.close()
        self._router.close()
        self._context.term()

    # --- messages -------------------------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        while True:
            try:
                sender, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._receive(sender, frames)
            except RollplexError as error:
                self.bad_frames.append(str(error))

    def _receive(self, sender: bytes, frames: Sequence[bytes]) -> None:
        if sender == self._identity and self.joined_s is not None:
            message = self._channel.from_worker.decode_frames(frames)
            self.heard.append(Heard(message=message, at_s=time.monotonic()))
            return
        if self._admitted is None or len(frames) != 1:
            raise ProtocolError("message before the handshake", got=repr(sender), needed="a hello on the stream first")
        hello = decode_hello(frames[0])
        refusal = hello if isinstance(hello, Refused) else check_hello(hello, self._expected, sender)
        if refusal is not None:
            self.wrong_hello = refusal
            raise refusal.error()
        self._router.send_multipart([sender, self._welcome])
        self.joined_s = time.monotonic()

    # --- the stream -----------------------------------------------------------------------------------------------

    def _serve(self, stream: socket.socket) -> None:
        try:
            payload, _ = recv(stream, STREAM_S, MAX_HOLDER_FRAME_BYTES, 0)
            if stream is self._admitted:
                self._fetched(stream, payload)
            else:
                self._shake_hands(stream, payload)
        except (EOFError, OSError):
            self._drop(stream)
        except RollplexError as error:
            self.bad_frames.append(f"on the stream: {error}")
            self._drop(stream)

    def _shake_hands(self, stream: socket.socket, payload: bytes) -> None:
        hello = decode_hello(payload)
        if isinstance(hello, Refused):
            refusal: Refused | None = hello
        else:
            self.hellos.append(hello)
            refusal = check_hello(hello, self._expected)
        self.wrong_hello = self.wrong_hello or refusal
        if self._refusals:
            refusal = self._refusals.pop(0)
        if refusal is not None:
            send(stream, encode_handshake(refusal), (), STREAM_S)
            self._drop(stream)
            return
        send(stream, self._welcome, (), STREAM_S)
        self._admitted = stream

    def _fetched(self, stream: socket.socket, payload: bytes) -> None:
        number = TO_HOLDER.decode(payload).segment
        if number not in self._segments:
            send(stream, FROM_HOLDER.encode(NoSuchSegment(segment=number, why="there is none")), (), STREAM_S)
            return
        fd, ref = self._segments[number]
        answer = Descriptor(segment=number, kind=ref.kind, size_bytes=ref.size_bytes, memory=ref.memory)
        send(stream, FROM_HOLDER.encode(answer), (fd,), STREAM_S)

    def _drop(self, stream: socket.socket) -> None:
        self._streams.pop(stream.fileno())
        self._poller.unregister(stream.fileno())
        stream.close()
        if stream is self._admitted:
            self._admitted = None
            self.ended_s = time.monotonic()
