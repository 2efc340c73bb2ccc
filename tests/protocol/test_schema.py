"""The schema hash: equal everywhere for equal messages, different for any difference."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from rollplex.protocol.common import Role
from rollplex.protocol.handshake import Hello, Refused, Welcome
from rollplex.protocol.schema import PROTOCOL_VERSION, describe, digest, schema_hash

HANDSHAKE_OF_VERSION_1 = "c1e279c8d861bff82e81d04cc86982dfdd1cf32dc8e4547f1e0c8cb5390c5d45"


def test_the_hash_is_the_same_in_every_process() -> None:
    program = (
        "from rollplex.protocol.schema import schema_hash; from rollplex.protocol.common import Role; "
        "print(*map(schema_hash, Role))"
    )
    for seed in ("0", "1"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        result = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60, env=environment
        )
        assert result.stdout.split() == [schema_hash(role) for role in Role]


def test_roles_have_different_hashes_of_64_hex_digits() -> None:
    hashes = {schema_hash(role) for role in Role}
    assert len(hashes) == len(Role)
    assert all(len(value) == 64 and int(value, 16) >= 0 for value in hashes)


class Colour(enum.StrEnum):
    RED = "red"


class MoreColours(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


MoreColours.__name__ = "Colour"
Small = Annotated[int, Meta(ge=0, le=9)]


def message(name: str = "M", tag: str = "M", forbid: bool = True, **fields: Any) -> Any:
    chosen = {"a": Small, "b": (Colour, Colour.RED), "c": tuple[Small, ...]} | fields
    described = [(key, *value) if isinstance(value, tuple) else (key, value) for key, value in chosen.items()]
    return msgspec.defstruct(name, described, kw_only=True, frozen=True, tag=tag, forbid_unknown_fields=forbid)


@pytest.mark.parametrize(
    "changed",
    [
        message(name="N"),
        message(tag="N"),
        message(forbid=False),
        message(d=int),
        message(a=int),
        message(a=Annotated[int, Meta(ge=0, le=10)]),
        message(a=Annotated[float, Meta(ge=0, le=9)]),
        message(a=Small | None),
        message(a=(Small, 0)),
        message(b=Colour),
        message(b=(Colour | None, None)),
        message(b=(MoreColours, MoreColours.RED)),
        message(c=tuple[Small, Small]),
        message(c=Annotated[tuple[Small, ...], Meta(max_length=3)]),
        message(c=tuple[int, ...]),
        message(c=dict[str, Small]),
    ],
)
def test_any_change_of_a_message_changes_its_description(changed: Any) -> None:
    assert describe(changed) != describe(message())
    assert describe(changed | None) != describe(message() | None)


def test_the_order_of_fields_and_of_a_unions_members_does_not_matter() -> None:
    """Messages are maps with a tag: neither order is on the wire."""
    one, two = message(), message(name="N", tag="N")
    assert describe(one | two) == describe(two | one)
    swapped = msgspec.defstruct(
        "M",
        [("c", tuple[Small, ...]), ("b", Colour, Colour.RED), ("a", Small)],
        kw_only=True,
        frozen=True,
        tag="M",
        forbid_unknown_fields=True,
    )
    assert digest(describe(swapped)) == digest(describe(one))
    assert digest(describe(swapped | two)) == digest(describe(two | one))


def test_a_type_that_would_be_left_out_of_the_hash_is_refused() -> None:
    with pytest.raises(TypeError, match="no description"):
        describe(message(a=set[int]))


def test_whoever_changes_the_handshake_raises_the_protocol_version() -> None:
    """The hello is read before hashes are compared. If this fails: raise PROTOCOL_VERSION, then pin the new text."""
    assert PROTOCOL_VERSION == 1
    assert digest(describe(Hello | Welcome | Refused)) == HANDSHAKE_OF_VERSION_1
