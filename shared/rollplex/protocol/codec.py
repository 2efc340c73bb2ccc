"""Bytes <-> messages: one typed msgpack decoder per channel and direction, made once.

Owns the limits on what a peer may send. Knows nothing of sockets. A message is exactly one frame (ZeroMQ's own limit is
per frame, and an oversized frame is lost silently there; so the sender refuses it here and the receiver caps parts and
size). Whatever is wrong with a frame comes out as ProtocolError and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

import msgspec

from rollplex.errors import ProtocolError
from rollplex.protocol.common import Role
from rollplex.protocol.holder import FromHolder, ToHolder
from rollplex.protocol.inputs import FromInput, ToInput
from rollplex.protocol.prefix import FromPrefix, ToPrefix
from rollplex.protocol.reward import FromReward, ToReward
from rollplex.protocol.rollout import FromRollout, ToRollout
from rollplex.protocol.trainer import FromTrainer, ToTrainer

MAX_FRAME_BYTES = 128 * 2**20
"""Limit of one frame, so of one message. Also the value for ZMQ_MAXMSGSIZE."""
MAX_HOLDER_FRAME_BYTES = 64 * 2**10
"""The same on the stream that passes segments."""

MessageT = TypeVar("MessageT")
ToT = TypeVar("ToT")
FromT = TypeVar("FromT")


class Codec(Generic[MessageT]):
    """Encodes and decodes the messages of one direction of one channel.

    Args:
        name: the direction as errors name it, such as "coordinator -> rollout".
        union: the message struct, or the union of them.
        max_frame_bytes: frames above this are refused on both sides.
    """

    def __init__(self, name: str, union: Any, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.name = name
        self.union = union
        self.types: tuple[type[msgspec.Struct], ...] = get_args(union) or (union,)
        self.max_frame_bytes = max_frame_bytes
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(union)
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: MessageT) -> bytes:
        """The frame of a message. Refuses what the receiver would refuse, so that the error arises where its cause is.

        Raises:
            ProtocolError: the message is not of this direction, breaks a bound of its struct, or is too large.
        """
        if type(message) not in self.types:
            raise ProtocolError(
                "Message does not belong to this channel",
                got=type(message).__name__,
                needed=self._names(),
                where=self.name,
            )
        try:
            payload = self._encoder.encode(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ProtocolError(
                "Message cannot be encoded", got=f"{type(message).__name__}: {error}", where=self.name
            ) from error
        self.decode(payload)
        return payload

    def decode(self, payload: bytes | bytearray | memoryview) -> MessageT:
        """The message in one frame.

        Raises:
            ProtocolError: too large, not msgpack, not a message of this direction, or a field missing, unknown, of the
                wrong type or out of its bounds.
        """
        size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
        if size > self.max_frame_bytes:
            raise ProtocolError(
                "Frame is too large",
                got=f"{size} bytes",
                needed=f"at most {self.max_frame_bytes} bytes",
                where=self.name,
            )
        try:
            return self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise ProtocolError("Malformed message", got=str(error), needed=self._names(), where=self.name) from error
        except RecursionError as error:
            raise ProtocolError("Message is nested too deeply", needed=self._names(), where=self.name) from error

    def decode_frames(self, frames: Sequence[bytes]) -> MessageT:
        """The message in the payload frames of one ZeroMQ message (identity frame already taken off).

        Raises:
            ProtocolError: not exactly one frame, or as `decode`.
        """
        if len(frames) != 1:
            raise ProtocolError(
                "Message has the wrong number of parts", got=f"{len(frames)} frames", needed="one", where=self.name
            )
        return self.decode(frames[0])

    def _names(self) -> str:
        return "one of " + ", ".join(kind.__name__ for kind in self.types)


@dataclass(frozen=True, kw_only=True)
class Channel(Generic[ToT, FromT]):
    """Both directions between the coordinator and one role."""

    to_worker: Codec[ToT]
    from_worker: Codec[FromT]


def _channel(role: Role, to_worker: Any, from_worker: Any) -> Channel[Any, Any]:
    return Channel(
        to_worker=Codec(f"coordinator -> {role}", to_worker), from_worker=Codec(f"{role} -> coordinator", from_worker)
    )


ROLLOUT_CHANNEL: Channel[ToRollout, FromRollout] = _channel(Role.ROLLOUT, ToRollout, FromRollout)
PREFIX_CHANNEL: Channel[ToPrefix, FromPrefix] = _channel(Role.PREFIX, ToPrefix, FromPrefix)
TRAINER_CHANNEL: Channel[ToTrainer, FromTrainer] = _channel(Role.TRAINER, ToTrainer, FromTrainer)
INPUT_CHANNEL: Channel[ToInput, FromInput] = _channel(Role.INPUT, ToInput, FromInput)
REWARD_CHANNEL: Channel[ToReward, FromReward] = _channel(Role.REWARD, ToReward, FromReward)

CHANNELS: dict[Role, Channel[Any, Any]] = {
    Role.ROLLOUT: ROLLOUT_CHANNEL,
    Role.PREFIX: PREFIX_CHANNEL,
    Role.TRAINER: TRAINER_CHANNEL,
    Role.INPUT: INPUT_CHANNEL,
    Role.REWARD: REWARD_CHANNEL,
}

TO_HOLDER: Codec[ToHolder] = Codec("worker -> holder", ToHolder, max_frame_bytes=MAX_HOLDER_FRAME_BYTES)
FROM_HOLDER: Codec[FromHolder] = Codec("holder -> worker", FromHolder, max_frame_bytes=MAX_HOLDER_FRAME_BYTES)
