"""What the rollout process and SGLang's scheduler process say to each other about the weights.

Owns the messages and their encoding (JSON in the frames of `rollplex.memory.fds`; nothing is ever unpickled). Knows
neither SGLang nor torch.

    scheduler process                       rollout process
    Ready ────────────────────────────────► one connection per engine
    ◄──────────── Offer, with the segment's descriptor
    Mapped or Trouble ────────────────────► the engine is used only after Mapped
    ◄──────────── ReadBytes, LoadWord, Digest, Look, Copy      one at a time, for as long as both live
    ◄──────────── Inputs, with the descriptor of a unit's      before the unit; it is kept until the scheduler rests
    Bytes, Word, Text, Fine or Trouble ───►
"""

from __future__ import annotations

import socket
from typing import Final, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from rollplex.errors import ProtocolError
from rollplex.memory.fds import recv, send
from rollplex.protocol.common import Count, Memory, Parallel

SOCKET_VARIABLE: Final = "ROLLPLEX_SGLANG_SOCKET"
"""Environment variable of the scheduler process: the socket on which the rollout process waits for it."""
MAX_FRAME_BYTES: Final = 16 * 2**20
SEND_DEADLINE_S: Final = 30.0


class Ready(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The loader has connected."""

    pid: Count


class Offer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The weights; their descriptor travels with it."""

    memory: Memory
    size_bytes: Count
    path: str
    dtype: str
    freeze_vision: bool
    table_hash: str
    never_sampled: tuple[Count, ...]
    parallel: Parallel = Parallel()
    """Which rank's parameters the segment holds."""
    allocator_bytes: Count = 0
    """What torch may take of the device for itself, pool included; 0: no limit."""
    decode_share: float = 1.0
    """Share of the device's multiprocessors that decoding keeps to beside prefix work."""
    run_dir: str = ""
    """Of the run, where it is said whether there is prefix work; "": there is no run."""
    own_weights: bool = False
    """The parameters are copies of the segment's; `Copy` renews them."""


class Mapped(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Every parameter of SGLang's model lies in the segment: its name, and its offset there in bytes. With weights of
    its own: what it is a copy of."""

    offsets: dict[str, Count]


class ReadBytes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """A copy of some bytes of the segment."""

    offset: Count
    size_bytes: Count


class LoadWord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The 64-bit number at an offset."""

    offset: Count


class Digest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """`rollplex.memory.digest.digest` over the scheduler's mapping."""


class Look(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Whether every parameter still lies in the segment, or is still a copy of what is there."""


class Copy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Copy the segment's parameters into SGLang's own."""


class Inputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The segment in which the next unit's pictures lie; its descriptor travels with it."""

    size_bytes: Count


class Bytes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Of `ReadBytes`."""

    content: bytes


class Word(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Of `LoadWord`."""

    value: Count


class Text(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Of `Digest`."""

    value: str


class Fine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Of `Look`, `Copy` and `Inputs`: it is so."""


class Trouble(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """What was asked for cannot be done: the parts of a RollplexError."""

    kind: str
    what: str
    got: str = ""
    needed: str = ""
    do: str = ""


ToScheduler: TypeAlias = Offer | ReadBytes | LoadWord | Digest | Look | Copy | Inputs
FromScheduler: TypeAlias = Ready | Mapped | Bytes | Word | Text | Fine | Trouble

_T = TypeVar("_T")
_TO_SCHEDULER: Final = msgspec.json.Decoder(ToScheduler)
_FROM_SCHEDULER: Final = msgspec.json.Decoder(FromScheduler)


def tell(sock: socket.socket, message: ToScheduler | FromScheduler, fds: tuple[int, ...] = ()) -> None:
    """Send one frame.

    Raises:
        EOFError: the peer has ended.
        WaitError: it does not read.
    """
    send(sock, msgspec.json.encode(message), fds, SEND_DEADLINE_S)


def hear_scheduler(sock: socket.socket, deadline_s: float) -> FromScheduler:
    """The next frame from the scheduler process.

    Raises:
        EOFError, WaitError, ProtocolError: as `rollplex.memory.fds.recv`; or no message of ours.
    """
    payload, _ = recv(sock, deadline_s, MAX_FRAME_BYTES, 0)
    return _decoded(_FROM_SCHEDULER, payload)


def hear_rollout(sock: socket.socket, deadline_s: float) -> tuple[ToScheduler, tuple[int, ...]]:
    """The next frame from the rollout process, and its descriptors, which are the caller's.

    Raises:
        As `hear_scheduler`.
    """
    payload, fds = recv(sock, deadline_s, MAX_FRAME_BYTES, 1)
    return _decoded(_TO_SCHEDULER, payload), fds


def _decoded(decoder: msgspec.json.Decoder[_T], payload: bytes) -> _T:
    try:
        return decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            "SGLang's scheduler process and the rollout process do not understand each other", got=str(error)
        ) from error
