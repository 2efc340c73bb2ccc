"""Who gets in, who does not and why, before anything else is read."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.errors import ProtocolError
from rollplex.protocol.common import HOST_INDEX, Device, Role
from rollplex.protocol.handshake import (
    MAX_HANDSHAKE_BYTES,
    Expected,
    Hello,
    Reason,
    Refused,
    Welcome,
    check_hello,
    decode_answer,
    decode_hello,
    encode_handshake,
    identity,
    make_hello,
)
from rollplex.protocol.schema import PROTOCOL_VERSION, schema_hash

SECRET = bytes(range(32))
PLACE = Device(node=0, index=1)
HELLO = make_hello(Role.PREFIX, PLACE, 3, SECRET)
EXPECTED = Expected(role=Role.PREFIX, device=PLACE, secret=SECRET, incarnation=3)
WELCOME = Welcome(run_id="r1", alive_every_s=1.0, received_within_s=5.0, grace_s=10.0)


def test_a_hello_and_its_answers_come_out_as_they_went_in() -> None:
    assert decode_hello(encode_handshake(HELLO)) == HELLO
    refused = Refused(reason=Reason.ROLE, ours="prefix", yours="trainer", do="x")
    assert decode_answer(encode_handshake(WELCOME)) == WELCOME
    assert decode_answer(encode_handshake(refused)) == refused


def test_the_expected_process_is_let_in() -> None:
    assert check_hello(HELLO, EXPECTED) is None
    assert check_hello(HELLO, EXPECTED, identity(Role.PREFIX, PLACE, 3)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": PROTOCOL_VERSION + 1}, Reason.PROTOCOL),
        ({"secret": SECRET[::-1]}, Reason.SECRET),
        ({"secret": SECRET[:-1]}, Reason.SECRET),
        ({"secret": b""}, Reason.SECRET),
        ({"schema_hash": "0" * 64}, Reason.SCHEMA),
        ({"schema_hash": ""}, Reason.SCHEMA),
        ({"role": Role.TRAINER, "schema_hash": schema_hash(Role.TRAINER)}, Reason.ROLE),
        ({"device": Device(node=1, index=1)}, Reason.DEVICE),
        ({"incarnation": 2}, Reason.INCARNATION),
        ({"incarnation": 4}, Reason.INCARNATION),
    ],
)
def test_anybody_else_is_refused_for_a_reason_that_names_both_sides(changes: dict[str, object], reason: Reason) -> None:
    refused = check_hello(msgspec.structs.replace(HELLO, **changes), EXPECTED)
    assert refused is not None
    assert refused.reason is reason
    assert refused.do
    if reason is not Reason.SECRET:
        assert refused.ours
        assert refused.ours != refused.yours


def test_a_wrong_secret_learns_nothing_and_is_found_before_all_that_is_not_public() -> None:
    wrong = msgspec.structs.replace(
        HELLO, secret=bytes(32), schema_hash="0", role=Role.INPUT, device=Device(index=9), incarnation=0
    )
    refused = check_hello(wrong, EXPECTED)
    assert refused is not None
    assert (refused.reason, refused.ours, refused.yours) == (Reason.SECRET, "", "")


def test_a_process_that_nobody_numbered_may_have_any_later_incarnation() -> None:
    later = msgspec.structs.replace(EXPECTED, exact=False)
    assert check_hello(msgspec.structs.replace(HELLO, incarnation=9), later) is None
    refused = check_hello(msgspec.structs.replace(HELLO, incarnation=2), later)
    assert refused is not None
    assert (refused.reason, refused.ours) == (Reason.INCARNATION, "3 or later")


def test_an_identity_that_is_not_the_hellos_is_refused() -> None:
    refused = check_hello(HELLO, EXPECTED, identity(Role.PREFIX, PLACE, 2))
    assert refused is not None
    assert refused.reason is Reason.IDENTITY


def test_a_hello_of_another_version_is_refused_without_reading_the_rest() -> None:
    frame = bytearray(encode_handshake(HELLO))[:6] + b"nothing of this is msgpack"
    frame[4:6] = (PROTOCOL_VERSION + 7).to_bytes(2, "little")
    refused = decode_hello(bytes(frame))
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.ours, refused.yours) == (Reason.PROTOCOL, "1", "8")
    assert "same Rollplex version" in refused.do


def test_a_worker_learns_that_its_coordinator_has_another_version() -> None:
    frame = bytearray(encode_handshake(WELCOME))
    frame[4] += 1
    with pytest.raises(ProtocolError, match="another protocol version"):
        decode_answer(bytes(frame))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"RPLX",
        b"RPLX\x01",
        b"XXXX\x01\x00",
        b"RPLX\x01\x00",
        encode_handshake(HELLO) + b"\x00",
        encode_handshake(WELCOME),
    ],
)
def test_what_is_not_a_hello_is_a_protocol_error(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_hello(frame)


def test_a_hello_is_no_answer() -> None:
    with pytest.raises(ProtocolError, match="another hello"):
        decode_answer(encode_handshake(HELLO))


def test_a_first_frame_is_measured_before_it_is_read() -> None:
    huge = b"RPLX\x01\x00" + bytes(MAX_HANDSHAKE_BYTES)
    for decode in (decode_hello, decode_answer):
        with pytest.raises(ProtocolError, match="too large"):
            decode(huge)


@given(frame=st.binary(max_size=100).map(lambda tail: b"RPLX\x01\x00" + tail) | st.binary(max_size=100))
@settings(max_examples=200, deadline=None)
def test_random_first_frames_are_refused_or_a_protocol_error(frame: bytes) -> None:
    for decode in (decode_hello, decode_answer):
        with contextlib.suppress(ProtocolError):
            assert isinstance(decode(frame), Refused)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_flipped_byte_never_lets_anybody_in(data: st.DataObject) -> None:
    """Apart from pid and host, which are for people to read."""
    frame = bytearray(encode_handshake(msgspec.structs.replace(HELLO, pid=1, host="")))
    place = data.draw(st.integers(0, len(frame) - 1))
    frame[place] ^= data.draw(st.integers(1, 255))
    try:
        hello = decode_hello(bytes(frame))
    except ProtocolError:
        return
    if isinstance(hello, Hello) and hello.pid == 1 and hello.host == "":
        assert check_hello(hello, EXPECTED) is not None


def test_the_secret_is_in_no_text() -> None:
    for text in (repr(HELLO), str(HELLO), repr(EXPECTED), f"{HELLO!r:>5}"):
        assert repr(SECRET)[2:10] not in text
        assert "secret" not in text


def test_a_refusal_is_an_error_that_says_what_to_do() -> None:
    refused = check_hello(msgspec.structs.replace(HELLO, schema_hash="0"), EXPECTED)
    assert refused is not None
    error = refused.error()
    assert isinstance(error, ProtocolError)
    assert schema_hash(Role.PREFIX) in str(error)
    assert "same Rollplex version" in str(error)


@given(
    role=st.sampled_from(Role),
    node=st.integers(0, 2**53),
    index=st.integers(0, HOST_INDEX - 1),
    number=st.integers(0, 2**53),
)
def test_an_identity_says_role_device_and_incarnation(role: Role, node: int, index: int, number: int) -> None:
    device = Device(node=node, index=index)
    frame = identity(role, device, number)
    assert frame == f"{role.value}/{node}:{index}/{number}".encode()
    assert len(frame) <= 255
    assert frame[0] != 0


def test_a_hello_with_fields_out_of_bounds_is_not_sent() -> None:
    with pytest.raises(ProtocolError):
        encode_handshake(make_hello(Role.PREFIX, PLACE, -1, SECRET))
    with pytest.raises(ProtocolError):
        encode_handshake(make_hello(Role.PREFIX, PLACE, 1, SECRET + b"x"))
