"""What two sides must agree on before they exchange a message.

Owns the protocol version and the schema hash: a digest of every field, bound, default and tag that a role's channel and
the segment stream carry. It depends on nothing but the messages: equal in every process, Python version and msgspec
version; any change of any message of the role changes it. The hello itself must be readable before hashes can be
compared, so it is outside the hash: whoever changes the handshake's structs raises PROTOCOL_VERSION.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
from typing import Any

import msgspec
from msgspec import inspect

from rollplex.protocol.codec import CHANNELS, FROM_HOLDER, TO_HOLDER
from rollplex.protocol.common import Role

PROTOCOL_VERSION = 1
"""Raised when sockets, framing, handshake, or the meaning of a message change."""

_SCALARS: dict[type[inspect.Type], str] = {
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.StrType: "str",
    inspect.BytesType: "bin",
    inspect.BoolType: "bool",
    inspect.NoneType: "nil",
}
_BOUNDS = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "pattern")


@functools.cache
def schema_hash(role: Role) -> str:
    """sha256, in hex, of the canonical description of everything that `role` and the coordinator exchange."""
    return digest(describe_role(role))


def digest(description: dict[str, Any]) -> str:
    """sha256, in hex, of a description; the order of its keys does not matter."""
    return hashlib.sha256(_canonical(description).encode()).hexdigest()


def describe_role(role: Role) -> dict[str, Any]:
    """The description behind `schema_hash`: plain lists, dicts, strings and numbers."""
    channel = CHANNELS[role]
    return {
        "to_worker": describe(channel.to_worker.union),
        "from_worker": describe(channel.from_worker.union),
        "to_holder": describe(TO_HOLDER.union),
        "from_holder": describe(FROM_HOLDER.union),
    }


def describe(annotation: Any) -> dict[str, Any]:
    """Canonical description of a message type.

    Raises:
        TypeError: a type that this protocol does not use (so that a new one is not left out of the hash).
    """
    return _describe(inspect.type_info(annotation))


def _describe(info: inspect.Type) -> dict[str, Any]:
    for kind, name in _SCALARS.items():
        if isinstance(info, kind):
            return {"type": name} | _bounds(info)
    return _describe_compound(info)


def _describe_compound(info: inspect.Type) -> dict[str, Any]:
    match info:
        case inspect.StructType():
            return _describe_struct(info)
        case inspect.UnionType():
            return {"any_of": sorted((_describe(part) for part in info.types), key=_canonical)}
        case inspect.EnumType():
            return {"enum": info.cls.__name__, "values": sorted(str(member.value) for member in info.cls)}
        case inspect.VarTupleType():
            return {"array_of": _describe(info.item_type)} | _bounds(info)
        case inspect.TupleType():
            return {"array": [_describe(item) for item in info.item_types]}
        case inspect.DictType():
            return {"map_of": _describe(info.value_type), "key": _describe(info.key_type)} | _bounds(info)
        case _:
            msg = f"{info!r} has no description in the protocol"
            raise TypeError(msg)


def _describe_struct(info: inspect.StructType) -> dict[str, Any]:
    return {
        "struct": info.cls.__name__,
        "tag": [info.tag_field, info.tag],
        "array_like": info.array_like,
        "forbid_unknown_fields": info.forbid_unknown_fields,
        "fields": {
            field.encode_name: {"type": _describe(field.type), "required": field.required, "default": _default(field)}
            for field in info.fields
        },
    }


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _bounds(info: inspect.Type) -> dict[str, Any]:
    return {name: value for name in _BOUNDS if (value := getattr(info, name, None)) is not None}


def _default(field: inspect.Field) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return _canonical(msgspec.to_builtins(field.default_factory()))
    if field.default is msgspec.NODEFAULT:
        return None
    value = field.default.value if isinstance(field.default, enum.Enum) else msgspec.to_builtins(field.default)
    return _canonical(value)
