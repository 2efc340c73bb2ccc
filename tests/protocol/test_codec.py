"""Frames: what goes in comes out, and whatever else comes in is a ProtocolError and nothing worse."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollplex.errors import ProtocolError
from rollplex.protocol.codec import (
    CHANNELS,
    FROM_HOLDER,
    MAX_HOLDER_FRAME_BYTES,
    REWARD_CHANNEL,
    ROLLOUT_CHANNEL,
    TO_HOLDER,
    Codec,
)
from rollplex.protocol.common import Alive, Drain, Drained, Kind, Leave, Received, Responses, Role
from rollplex.protocol.holder import Descriptor, Fetch
from rollplex.protocol.rollout import LoadRollout

CODECS = [codec for channel in CHANNELS.values() for codec in (channel.to_worker, channel.from_worker)]
CODECS += [TO_HOLDER, FROM_HOLDER]
QUICK = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
Messages = Callable[[Any], st.SearchStrategy[Any]]

TO_ROLLOUT = ROLLOUT_CHANNEL.to_worker
FROM_ROLLOUT = ROLLOUT_CHANNEL.from_worker


def each_codec(function: Any) -> Any:
    return pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name.replace(" ", ""))(function)


def pack(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


@each_codec
def test_every_message_of_a_direction_comes_out_as_it_went_in(codec: Codec[Any], messages: Messages) -> None:
    @QUICK
    @given(message=messages(codec.union))
    def check(message: Any) -> None:
        again = codec.decode(codec.encode(message))
        assert type(again) is type(message)
        assert again == message or again != again  # noqa: PLR0124 - a metric may be NaN

    check()


@each_codec
def test_random_bytes_are_a_protocol_error(codec: Codec[Any]) -> None:
    @QUICK
    @given(frame=st.binary(max_size=200))
    def check(frame: bytes) -> None:
        with pytest.raises(ProtocolError) as caught:
            codec.decode(frame)
        assert caught.value.where == codec.name

    check()


@each_codec
def test_a_cut_lengthened_or_flipped_frame_is_an_error_or_another_valid_message(
    codec: Codec[Any], messages: Messages
) -> None:
    @QUICK
    @given(message=messages(codec.union), data=st.data())
    def check(message: Any, data: st.DataObject) -> None:
        frame = codec.encode(message)
        cut = data.draw(st.integers(0, len(frame) - 1))
        with pytest.raises(ProtocolError):
            codec.decode(frame[:cut])
        with pytest.raises(ProtocolError):
            codec.decode(frame + frame[:1])
        flipped = bytearray(frame)
        flipped[cut] ^= data.draw(st.integers(1, 255))
        with contextlib.suppress(ProtocolError):
            assert isinstance(codec.decode(flipped), codec.types)

    check()


@each_codec
def test_a_missing_an_unknown_and_an_ill_typed_field_are_refused(codec: Codec[Any], messages: Messages) -> None:
    @QUICK
    @given(message=messages(codec.union), data=st.data())
    def check(message: Any, data: st.DataObject) -> None:
        fields = msgspec.msgpack.decode(codec.encode(message))
        with pytest.raises(ProtocolError, match="unknown field `surprise`"):
            codec.decode(pack(fields | {"surprise": 1}))
        required = [field.name for field in msgspec.structs.fields(message) if field.required]
        gone = data.draw(st.sampled_from([*required, "type"] if len(codec.types) > 1 else required))
        with pytest.raises(ProtocolError, match=gone):
            codec.decode(pack({name: value for name, value in fields.items() if name != gone}))
        with pytest.raises(ProtocolError):
            codec.decode(pack(fields | {data.draw(st.sampled_from(required)): [[]]}))

    check()


@each_codec
def test_a_message_of_another_direction_is_refused_on_both_sides(codec: Codec[Any]) -> None:
    strange = Drain(cause=1, version=1) if Drain not in codec.types else Received(cause=1)
    with pytest.raises(ProtocolError, match="does not belong to this channel"):
        codec.encode(strange)
    with pytest.raises(ProtocolError):
        codec.decode(pack(strange))


@pytest.mark.parametrize(
    "frame",
    [
        pack({"type": "Nobody", "cause": 1}),
        pack({"type": 3, "cause": 1}),
        pack(["Drain", 1]),
        pack(None),
        pack({"type": "Leave", "reason": b"bytes"}),
        b"\x82\xa4type\xa5Leave\xa6reason\xa2\xff\xfe",
        pack({"type": "Drain", "cause": -1, "version": 0}),
        pack({"type": "Drain", "cause": 2**53 + 1, "version": 0}),
        pack({"type": "Drain", "cause": 1.5, "version": 0}),
        pack({"type": "Leave", "reason": "x" * 4_097}),
        b"",
    ],
    ids=["tag", "tagtype", "array", "nil", "bytes", "utf8", "negative", "large", "float", "long", "empty"],
)
def test_a_known_kind_of_malformed_frame_is_a_protocol_error(frame: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        TO_ROLLOUT.decode(frame)
    assert caught.value.where == "coordinator -> rollout"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e13])
def test_a_time_that_is_none_is_refused(value: float) -> None:
    fields = {
        "type": "GroupRewarded",
        "cause": 1,
        "step": 0,
        "group": 0,
        "rewards": b"",
        "by_function": [],
        "texts": [],
    }
    codec = REWARD_CHANNEL.from_worker
    codec.decode(pack(fields | {"start_s": 1.0, "end_s": 2.0}))
    with pytest.raises(ProtocolError, match="end_s"):
        codec.decode(pack(fields | {"start_s": 1.0, "end_s": value}))


@pytest.mark.parametrize("nest", [b"\x91", b"\x81\xa1a"], ids=["arrays", "maps"])
@pytest.mark.parametrize(
    "prefix", [b"", b"\x81\xa4type", b"\x82\xa4type\xa5Drain\xa5cause"], ids=["bare", "tag", "field"]
)
def test_a_hundred_thousand_levels_are_a_protocol_error(prefix: bytes, nest: bytes) -> None:
    with pytest.raises(ProtocolError):
        TO_ROLLOUT.decode(prefix + nest * 100_000 + b"\xc0")


def test_a_decoder_that_recurses_too_deeply_raises_protocol_error_too() -> None:
    anything: Codec[Any] = Codec("anything", dict[str, Any])
    with pytest.raises(ProtocolError, match="nested too deeply"):
        anything.decode(b"\x81\xa1a" * 100_000 + b"\xc0")


@pytest.mark.parametrize(
    "head",
    [
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
    ],
    ids=["bin", "str", "array", "map", "ext"],
)
def test_a_header_that_promises_four_gigabytes_allocates_nothing(head: bytes) -> None:
    wrapped = b"\x83\xa4type\xadGroupFinished\xa5cause\x01\xa9responses" + head
    nested = b"\x83\xa5group\x01\xa6tokens\xc4\x00\xa7lengths" + head
    tracemalloc.start()
    try:
        for frame in (head, wrapped, wrapped.removesuffix(head) + nested):
            with pytest.raises(ProtocolError):
                FROM_ROLLOUT.decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_collections_and_blobs_above_their_bounds_are_refused() -> None:
    codec: Codec[Responses] = Codec("responses", Responses)
    good = {"group": 0, "lengths": [1], "tokens": b"1234"}
    codec.decode(pack(good))
    with pytest.raises(ProtocolError, match="lengths"):
        codec.decode(pack(good | {"lengths": [0] * 65_537}))
    with pytest.raises(ProtocolError, match="tokens"):
        codec.decode(pack(good | {"tokens": bytes(64 * 2**20 + 1)}))


def test_a_frame_above_the_limit_is_refused_by_sender_and_receiver() -> None:
    small: Codec[Leave] = Codec("small", Leave, max_frame_bytes=40)
    short = Leave(reason="x")
    assert small.decode(small.encode(short)) == short
    with pytest.raises(ProtocolError, match="too large"):
        small.encode(Leave(reason="x" * 40))
    with pytest.raises(ProtocolError, match="too large"):
        small.decode(memoryview(bytes(41)))
    with pytest.raises(ProtocolError, match="too large"):
        TO_HOLDER.decode(bytes(MAX_HOLDER_FRAME_BYTES + 1))


@pytest.mark.parametrize(
    "message",
    [
        Drain(cause=-1, version=0),
        Drain(cause=10**30, version=0),
        Drain(cause="1", version=0),  # type: ignore[arg-type]  # what a caller without a type checker may do
        Drain(cause=object(), version=0),  # type: ignore[arg-type]  # the same
        Leave(reason="x" * 5_000),
        Leave(reason="\ud800"),
    ],
)
def test_the_sender_refuses_what_the_receiver_would_refuse(message: Any) -> None:
    with pytest.raises(ProtocolError):
        TO_ROLLOUT.encode(message)


@pytest.mark.parametrize("frames", [[], [b"a", b"b"]])
def test_a_message_is_exactly_one_frame(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError, match="wrong number of parts"):
        FROM_ROLLOUT.decode_frames(frames)
    assert FROM_ROLLOUT.decode_frames([FROM_ROLLOUT.encode(Alive(progress=3))]) == Alive(progress=3)


def test_each_role_has_a_channel_that_carries_the_common_messages() -> None:
    assert set(CHANNELS) == set(Role)
    for channel in CHANNELS.values():
        assert Leave in channel.to_worker.types
        assert Received in channel.from_worker.types
        assert Alive in channel.from_worker.types
    readers = [role for role, channel in CHANNELS.items() if Drain in channel.to_worker.types]
    assert readers == [Role.ROLLOUT, Role.PREFIX]
    assert all(Drained in CHANNELS[role].from_worker.types for role in readers)
    assert LoadRollout in TO_ROLLOUT.types


def test_the_segment_stream_carries_fetch_and_descriptor() -> None:
    assert TO_HOLDER.decode(TO_HOLDER.encode(Fetch(segment=4))) == Fetch(segment=4)
    answer = Descriptor(segment=4, kind=Kind.INPUTS, size_bytes=10)
    assert FROM_HOLDER.decode(FROM_HOLDER.encode(answer)) == answer
