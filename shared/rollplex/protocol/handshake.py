"""The first frame on every connection, and whether the coordinator lets its sender in. Pure: no sockets, no clock.

A handshake frame is 4 bytes "RPLX", the sender's protocol version (uint16, little-endian), then msgpack. The first six
bytes never change, so that two sides of different versions can tell each other so; everything else may change with
the version. The frame is checked for size and version before it is decoded, the secret before anything else in it.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from enum import StrEnum
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from rollplex.errors import ProtocolError
from rollplex.protocol.codec import MAX_FRAME_BYTES, Codec
from rollplex.protocol.common import Count, Device, Role, Seconds
from rollplex.protocol.schema import PROTOCOL_VERSION, schema_hash

MAGIC = b"RPLX"
SECRET_BYTES = 32
MAX_HANDSHAKE_BYTES = 8 * 2**10

Short = Annotated[str, Meta(max_length=255)]
_SAME_VERSION = "Run the same Rollplex version in every process"
_HEAD = struct.Struct("<4sH")


# worker -> coordinator, first on the ZeroMQ socket and first on the segment stream. Answer: Welcome or Refused.
class Hello(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    protocol: Annotated[int, Meta(ge=0, le=2**16 - 1)]
    schema_hash: Annotated[str, Meta(max_length=64)]
    role: Role
    device: Device
    incarnation: Count
    """Number of this service process since the run began; messages of an older one are refused."""
    secret: Annotated[bytes, Meta(max_length=SECRET_BYTES)]
    """The run's secret, from the file `secret` in the run directory."""
    pid: Count
    """As the worker sees itself; in a container not the host's."""
    host: Short = ""

    def __repr__(self) -> str:
        return f"Hello({self.role} {self.device} incarnation {self.incarnation}, pid {self.pid} on {self.host})"


# coordinator -> worker: instructions follow.
class Welcome(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    run_id: Short
    alive_every_s: Seconds
    """Send Alive this often."""
    received_within_s: Seconds
    """Answer each instruction with Received within this time; the work itself has deadlines of its own."""
    grace_s: Seconds
    """How long to hold on after the coordinator's end of file, before leaving."""
    max_frame_bytes: Count = MAX_FRAME_BYTES


class Reason(StrEnum):
    """Why a hello is refused."""

    PROTOCOL = "protocol"
    SCHEMA = "schema"
    SECRET = "secret"  # noqa: S105 - the name of a reason
    ROLE = "role"
    DEVICE = "device"
    INCARNATION = "incarnation"
    IDENTITY = "identity"


# coordinator -> worker: not let in; the connection is of no use any more.
class Refused(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    reason: Reason
    ours: Short
    """What the coordinator has or wants. Empty for the secret."""
    yours: Short
    do: Short

    def error(self) -> ProtocolError:
        """As an error for the worker to raise."""
        return ProtocolError(
            f"The coordinator refused the connection ({self.reason})", got=self.yours, needed=self.ours, do=self.do
        )


Handshake: TypeAlias = Hello | Welcome | Refused

_CODEC: Codec[Handshake] = Codec("handshake", Handshake, max_frame_bytes=MAX_HANDSHAKE_BYTES)


class Expected(Struct, frozen=True, kw_only=True):
    """Whom the coordinator awaits on a connection."""

    role: Role
    device: Device
    secret: bytes
    incarnation: int
    """The lowest that is let in."""
    exact: bool = True
    """Only that one (the coordinator itself started the process)."""

    def __repr__(self) -> str:
        return f"Expected({self.role} {self.device} incarnation {self.incarnation}{'' if self.exact else ' or later'})"


def make_hello(role: Role, device: Device, incarnation: int, secret: bytes) -> Hello:
    """The hello of this process."""
    return Hello(
        protocol=PROTOCOL_VERSION,
        schema_hash=schema_hash(role),
        role=role,
        device=device,
        incarnation=incarnation,
        secret=secret,
        pid=os.getpid(),
        host=socket.gethostname()[:255],
    )


def encode_handshake(message: Handshake) -> bytes:
    """The frame of a hello or of its answer.

    Raises:
        ProtocolError: a field out of its bounds.
    """
    return _HEAD.pack(MAGIC, PROTOCOL_VERSION) + _CODEC.encode(message)


def decode_hello(frame: bytes) -> Hello | Refused:
    """Coordinator's side: the hello in a first frame, or the refusal to send if its sender speaks another version.

    Raises:
        ProtocolError: too large, not a handshake, malformed, or not a hello: drop the peer without an answer.
    """
    version, body = _split(frame)
    if version != PROTOCOL_VERSION:
        return _refuse_version(version)
    match _CODEC.decode(body):
        case Hello() as hello:
            return hello
        case other:
            raise ProtocolError("First frame is not a hello", got=type(other).__name__, needed="Hello")


def decode_answer(frame: bytes) -> Welcome | Refused:
    """Worker's side: the answer to a hello.

    Raises:
        ProtocolError: too large, not a handshake, another protocol version, malformed, or not an answer.
    """
    version, body = _split(frame)
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            "The coordinator speaks another protocol version",
            got=str(version),
            needed=str(PROTOCOL_VERSION),
            do=_SAME_VERSION,
        )
    match _CODEC.decode(body):
        case Hello():
            raise ProtocolError("Answer to a hello is another hello", needed="Welcome or Refused")
        case answer:
            return answer


def check_hello(hello: Hello, expected: Expected, identity_frame: bytes | None = None) -> Refused | None:
    """Whether the sender of `hello` is the one that is awaited; None lets it in.

    Args:
        identity_frame: what the ROUTER shows for the peer; None on the segment stream, which has no identities.
    """
    if hello.protocol != PROTOCOL_VERSION:
        return _refuse_version(hello.protocol)
    if not hmac.compare_digest(hello.secret, expected.secret):
        return Refused(
            reason=Reason.SECRET,
            ours="",
            yours="",
            do="Read the secret file in the run directory again: a new run has a new secret",
        )
    wanted = schema_hash(hello.role)
    if hello.schema_hash != wanted:
        return Refused(
            reason=Reason.SCHEMA,
            ours=wanted,
            yours=hello.schema_hash,
            do="The messages of this channel differ: run the same Rollplex version in every process",
        )
    return _check_place(hello, expected, identity_frame)


def _check_place(hello: Hello, expected: Expected, identity_frame: bytes | None) -> Refused | None:
    if hello.role is not expected.role:
        return Refused(
            reason=Reason.ROLE, ours=expected.role, yours=hello.role, do="Start the service that this place is for"
        )
    if hello.device != expected.device:
        return Refused(
            reason=Reason.DEVICE,
            ours=str(expected.device),
            yours=str(hello.device),
            do="Give the service the node and device index of the configuration",
        )
    if hello.incarnation < expected.incarnation or (expected.exact and hello.incarnation != expected.incarnation):
        return Refused(
            reason=Reason.INCARNATION,
            ours=f"{expected.incarnation}{'' if expected.exact else ' or later'}",
            yours=str(hello.incarnation),
            do="This process was replaced or was not started for this run: let it end",
        )
    if identity_frame is not None and identity_frame != identity(hello.role, hello.device, hello.incarnation):
        return Refused(
            reason=Reason.IDENTITY,
            ours=identity(hello.role, hello.device, hello.incarnation).decode(),
            yours=repr(identity_frame[:80]),
            do="Set the socket's identity to role/node:index/incarnation before connecting",
        )
    return None


def identity(role: Role, device: Device, incarnation: int) -> bytes:
    """ZMQ_IDENTITY of a worker's DEALER: role/node:index/incarnation. A second socket with the same identity is
    ignored by the ROUTER without a word, hence the incarnation."""
    return f"{role}/{device}/{incarnation}".encode()


def _split(frame: bytes) -> tuple[int, memoryview]:
    if len(frame) > MAX_HANDSHAKE_BYTES:
        raise ProtocolError(
            "Handshake frame is too large", got=f"{len(frame)} bytes", needed=f"at most {MAX_HANDSHAKE_BYTES} bytes"
        )
    if len(frame) < _HEAD.size or not frame.startswith(MAGIC):
        raise ProtocolError("First frame is not a Rollplex handshake", got=repr(bytes(frame[:16])), needed="RPLX ...")
    return _HEAD.unpack_from(frame)[1], memoryview(frame)[_HEAD.size :]


def _refuse_version(theirs: int) -> Refused:
    return Refused(
        reason=Reason.PROTOCOL,
        ours=str(PROTOCOL_VERSION),
        yours=str(theirs),
        do=_SAME_VERSION,
    )
