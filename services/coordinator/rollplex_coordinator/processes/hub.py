"""The coordinator's sockets: one ROUTER for messages, one stream per worker for descriptors and death notices.

Owns who is connected. Checks handshakes, answers `Fetch`, turns frames into typed messages. Does not know what a
message means, and keeps no deadlines.

    poll() waits for: a frame, a connection, the end of a stream, a watched descriptor, or the timeout.
"""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Collection
from typing import Any, TypeAlias

import zmq
from msgspec import Struct

from rollplex.errors import ProtocolError, RollplexError
from rollplex.memory.fds import recv, send
from rollplex.protocol.codec import CHANNELS, FROM_HOLDER, MAX_FRAME_BYTES, MAX_HOLDER_FRAME_BYTES, TO_HOLDER
from rollplex.protocol.common import Device, Role
from rollplex.protocol.handshake import (
    Expected,
    Hello,
    Reason,
    Refused,
    Welcome,
    check_hello,
    decode_hello,
    encode_handshake,
    identity,
)
from rollplex.protocol.holder import Descriptor, NoSuchSegment
from rollplex.protocol.rundir import RunDir
from rollplex_coordinator.memory.holder import Holder

STREAM_DEADLINE_S = 2.0
HIGH_WATER_MARK = 1_024
MAX_BAD_FRAMES = 10

log = logging.getLogger("rollplex.coordinator")


class Peer(Struct, frozen=True, kw_only=True):
    """A worker that passed the handshake on the stream."""

    role: Role
    device: Device
    incarnation: int
    pid: int

    @property
    def identity(self) -> bytes:
        return identity(self.role, self.device, self.incarnation)

    def __str__(self) -> str:
        return f"{self.role}[{self.device}]"


class Joined(Struct, frozen=True, kw_only=True):
    """A worker's message socket is ready too: it can be instructed."""

    peer: Peer


class Arrived(Struct, frozen=True, kw_only=True):
    """A message of a joined worker."""

    peer: Peer
    message: Any


class Gone(Struct, frozen=True, kw_only=True):
    """A worker's stream ended: its process is dead or dying."""

    peer: Peer


class Ready(Struct, frozen=True, kw_only=True):
    """A descriptor given to `watch` became readable."""

    tag: str


Event: TypeAlias = Joined | Arrived | Gone | Ready


class Unreachable(ProtocolError):  # noqa: N818 - it names what happened
    """A message for a worker whose message socket is gone: its process is dead or dying."""


class Hub:
    """All connections of one coordinator."""

    def __init__(self, run_dir: RunDir, secret: bytes, welcome: Welcome, holder: Holder) -> None:
        self._secret = secret
        self._welcome = encode_handshake(welcome)
        self._expected: dict[tuple[Role, Device], Expected] = {}
        self._holder = holder
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._router.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._router.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._router.setsockopt(zmq.SNDTIMEO, int(STREAM_DEADLINE_S * 1000))
        self._router.setsockopt(zmq.LINGER, 500)
        self._router.bind(run_dir.control_endpoint)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(run_dir.segments_socket))
        self._listener.listen(64)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._listener.fileno(), zmq.POLLIN)
        self._watched: dict[int, str] = {}
        self._streams: dict[int, tuple[socket.socket, Peer | None]] = {}
        self._admitted: dict[bytes, Peer] = {}
        self._joined: dict[bytes, Peer] = {}
        self._bad_frames: dict[bytes, int] = {}
        self._fenced: set[bytes] = set()

    def expect(self, role: Role, device: Device, incarnation: int, *, exact: bool) -> None:
        """Let this worker in from now on; anybody else who claims the place is refused."""
        self._expected[role, device] = Expected(
            role=role, device=device, secret=self._secret, incarnation=incarnation, exact=exact
        )

    def watch(self, fd: int, tag: str) -> None:
        """Also wake for `fd`, as `Ready(tag)`."""
        self._watched[fd] = tag
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Wake for `fd` no more."""
        if self._watched.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def send(self, peer: Peer, message: Any) -> None:
        """Send one typed message.

        Raises:
            Unreachable: the peer's message socket is gone.
            ProtocolError: its queue is full, or the message is none of its channel.
        """
        try:
            self._router.send_multipart([peer.identity, CHANNELS[peer.role].to_worker.encode(message)])
        except zmq.ZMQError as error:
            kind = Unreachable if error.errno == zmq.EHOSTUNREACH else ProtocolError
            raise kind(
                "cannot send a message", got=f"{error}", needed="a connected peer that reads", where=str(peer)
            ) from error

    def unwatch_all(self) -> None:
        """Wake for messages, connections and streams only."""
        for fd in list(self._watched):
            self.unwatch(fd)

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait at most `timeout_s` and return what happened."""
        events: list[Event] = []
        for source, _ in self._poller.poll(max(0, math.ceil(timeout_s * 1000))):
            if source is self._router:
                events += self._receive_all()
            elif source == self._listener.fileno():
                self._accept()
            elif source in self._watched:
                events.append(Ready(tag=self._watched[source]))
            elif isinstance(source, int) and source in self._streams:
                events += self._serve_stream(source)
        return events

    def disconnect(self, peer: Peer) -> None:
        """Close a worker's stream; it sees the end of the run."""
        for fd, (_, owner) in list(self._streams.items()):
            if owner == peer:
                self._drop_stream(fd)
        self._admitted.pop(peer.identity, None)
        self._joined.pop(peer.identity, None)

    def fence(self, roles: Collection[Role]) -> None:
        """Of the processes of these roles that have come so far nothing is heard any more, not even their end."""
        for fd, (_, owner) in list(self._streams.items()):
            if owner is not None and owner.role in roles:
                self._drop_stream(fd)
        for known in (self._admitted, self._joined):
            for identity_, peer in list(known.items()):
                if peer.role in roles:
                    del known[identity_]
                    self._fenced.add(identity_)

    def close(self) -> None:
        """Close everything; workers that are still there see the end of their stream."""
        for fd in list(self._streams):
            self._drop_stream(fd)
        self._listener.close()
        self._router.close()
        self._context.term()

    # --- messages -------------------------------------------------------------------------------------------------

    def _receive_all(self) -> list[Event]:
        events: list[Event] = []
        for _ in range(HIGH_WATER_MARK):
            try:
                sender, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                events += self._receive(sender, frames)
            except ProtocolError as error:
                events += self._count_bad_frame(sender, error)
        return events

    def _receive(self, sender: bytes, frames: list[bytes]) -> list[Event]:
        if sender in self._fenced:
            return []
        peer = self._joined.get(sender)
        if peer is not None:
            return [Arrived(peer=peer, message=CHANNELS[peer.role].from_worker.decode_frames(frames))]
        admitted = self._admitted.get(sender)
        if admitted is None or len(frames) != 1:
            raise ProtocolError("message from a stranger", got=repr(sender), needed="a handshake on the stream first")
        hello = decode_hello(frames[0])
        refusal = hello if isinstance(hello, Refused) else self._check(hello, sender)
        if refusal is not None:
            raise refusal.error()
        try:
            self._router.send_multipart([sender, self._welcome])
        except zmq.ZMQError as error:
            log.debug("%s ended before it was welcome: %s", admitted, error)  # the end of its stream says so
            return []
        self._joined[sender] = admitted
        return [Joined(peer=admitted)]

    def _count_bad_frame(self, sender: bytes, error: ProtocolError) -> list[Event]:
        """Bad frames are dropped and logged; a worker that goes on is cut off, as if it had ended."""
        count = self._bad_frames[sender] = self._bad_frames.get(sender, 0) + 1
        if count <= MAX_BAD_FRAMES:
            log.warning("dropped frame %d from %r: %s", count, sender, error)
        peer = self._joined.get(sender)
        if count == MAX_BAD_FRAMES and peer is not None:
            log.error("%s sent %d bad frames and is cut off", peer, count)
            self.disconnect(peer)
            return [Gone(peer=peer)]
        return []

    # --- streams --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        stream, _ = self._listener.accept()
        self._streams[stream.fileno()] = (stream, None)
        self._poller.register(stream.fileno(), zmq.POLLIN)

    def _serve_stream(self, fd: int) -> list[Event]:
        stream, peer = self._streams[fd]
        try:
            payload, fds = recv(stream, STREAM_DEADLINE_S, MAX_HOLDER_FRAME_BYTES, 0)
        except (EOFError, OSError, RollplexError) as error:
            log.debug("stream of %s ended: %s", peer or "a stranger", str(error) or "end of file")
            return self._end_stream(fd, peer)
        assert not fds, "recv was told to refuse descriptors"
        try:
            if peer is None:
                self._shake_hands(fd, stream, payload)
            else:
                self._answer_fetch(stream, payload)
        except EOFError:
            return self._end_stream(fd, peer)  # it ended before it had its answer
        except RollplexError as error:
            log.warning("closing a stream of %s: %s", peer or "a stranger", error)
            return self._end_stream(fd, peer)
        return []

    def _end_stream(self, fd: int, peer: Peer | None) -> list[Event]:
        self._drop_stream(fd)
        if peer is None:
            return []
        self._admitted.pop(peer.identity, None)  # but its last words may still be on their way: it stays joined
        return [Gone(peer=peer)]

    def _shake_hands(self, fd: int, stream: socket.socket, payload: bytes) -> None:
        hello = decode_hello(payload)
        refusal = hello if isinstance(hello, Refused) else self._check(hello, None) or self._refuse_double(hello)
        if isinstance(hello, Refused) or refusal is not None:
            assert refusal is not None
            log.warning("refused %s: %s", hello, refusal)
            send(stream, encode_handshake(refusal), (), STREAM_DEADLINE_S)
            self._drop_stream(fd)
            return
        peer = Peer(role=hello.role, device=hello.device, incarnation=hello.incarnation, pid=hello.pid)
        send(stream, self._welcome, (), STREAM_DEADLINE_S)
        self._streams[fd] = (stream, peer)
        self._admitted[peer.identity] = peer
        self._joined.pop(peer.identity, None)

    def _refuse_double(self, hello: Hello) -> Refused | None:
        twin = self._admitted.get(identity(hello.role, hello.device, hello.incarnation))
        if twin is None:
            return None
        return Refused(
            reason=Reason.IDENTITY,
            ours=f"one {hello.role} on {hello.device} (pid {twin.pid})",
            yours=f"a second one (pid {hello.pid})",
            do="Stop one of the two.",
        )

    def _answer_fetch(self, stream: socket.socket, payload: bytes) -> None:
        fetch = TO_HOLDER.decode(payload)
        held = self._holder.find(fetch.segment)
        if held is None:
            send(
                stream,
                FROM_HOLDER.encode(NoSuchSegment(segment=fetch.segment, why="its lease has ended")),
                (),
                STREAM_DEADLINE_S,
            )
            return
        ref = held.ref
        answer = Descriptor(segment=ref.segment, kind=ref.kind, size_bytes=ref.size_bytes, memory=ref.memory)
        send(stream, FROM_HOLDER.encode(answer), (held.fd,), STREAM_DEADLINE_S)

    def _check(self, hello: Hello, identity_frame: bytes | None) -> Refused | None:
        known = self._expected.get((hello.role, hello.device))
        anybody = Expected(
            role=hello.role, device=hello.device, secret=self._secret, incarnation=hello.incarnation, exact=True
        )
        refusal = check_hello(hello, known or anybody, identity_frame)
        if refusal is not None or known is not None:
            return refusal
        return Refused(
            reason=Reason.ROLE,
            ours=", ".join(f"{role} on {device}" for role, device in self._expected)[:255],
            yours=f"{hello.role} on {hello.device}",
            do="Start the services that the configuration names.",
        )

    def _drop_stream(self, fd: int) -> None:
        stream, _ = self._streams.pop(fd)
        self._poller.unregister(fd)
        stream.close()
