"""Rules that every message struct keeps."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

import rollplex.protocol
from rollplex.protocol.codec import CHANNELS, FROM_HOLDER, TO_HOLDER

MODULES = [
    importlib.import_module(f"rollplex.protocol.{m.name}") for m in pkgutil.iter_modules(rollplex.protocol.__path__)
]
NOT_ON_THE_WIRE = {"Expected", "Holder"}
MAY_BE_ANY_FLOAT = {"UpdateVote.metrics"}
"""Gradients that are not finite make metrics that are not."""


def _structs() -> list[type[msgspec.Struct]]:
    found = {
        value
        for module in MODULES
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value is not msgspec.Struct
    }
    return sorted((kind for kind in found if kind.__name__ not in NOT_ON_THE_WIRE), key=lambda kind: kind.__name__)


STRUCTS = _structs()


def each_struct(function: Any) -> Any:
    return pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)(function)


def _unbounded(info: inspect.Type, path: str) -> Iterator[str]:
    match info:
        case inspect.StrType() | inspect.BytesType():
            if info.max_length is None:
                yield path
        case inspect.VarTupleType() | inspect.DictType():
            if info.max_length is None:
                yield path
            parts = [info.item_type] if isinstance(info, inspect.VarTupleType) else [info.key_type, info.value_type]
            for part in parts:
                yield from _unbounded(part, path)
        case inspect.IntType():
            if info.ge is None or info.le is None:
                yield path
        case inspect.FloatType():
            if (info.ge is None and info.gt is None) or info.le is None:
                yield path
        case inspect.TupleType():
            for part in info.item_types:
                yield from _unbounded(part, path)
        case inspect.UnionType():
            for part in info.types:
                yield from _unbounded(part, path)
        case inspect.StructType() | inspect.EnumType() | inspect.BoolType() | inspect.NoneType():
            pass
        case _:
            yield f"{path} is of a kind that the protocol does not use: {info}"


@each_struct
def test_it_is_frozen_and_refuses_unknown_fields_and_positions(struct: type[msgspec.Struct]) -> None:
    config = struct.__struct_config__
    assert config.frozen
    assert config.forbid_unknown_fields
    assert not config.array_like
    if msgspec.structs.fields(struct):
        with pytest.raises(TypeError, match="Extra positional arguments"):
            struct(1)


@each_struct
def test_every_text_blob_collection_and_number_has_bounds(struct: type[msgspec.Struct]) -> None:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    paths = [path for field in info.fields for path in _unbounded(field.type, f"{struct.__name__}.{field.name}")]
    assert set(paths) <= MAY_BE_ANY_FLOAT


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_struct_repeats_frozen_and_kw_only_for_type_checkers(module: Any) -> None:
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.ClassDef) and any(
            isinstance(base, ast.Name) and base.id == "Struct" for base in node.bases
        ):
            keywords = {keyword.arg for keyword in node.keywords}
            assert {"frozen", "kw_only"} <= keywords, node.name


def test_every_message_is_reached_from_a_channel_and_says_its_name() -> None:
    channels = [codec for channel in CHANNELS.values() for codec in (channel.to_worker, channel.from_worker)]
    for codec in (*channels, TO_HOLDER, FROM_HOLDER):
        for message in codec.types:
            assert message.__struct_config__.tag == message.__name__, message
            assert message in STRUCTS


@each_struct
def test_instructions_and_answers_name_their_cause(struct: type[msgspec.Struct]) -> None:
    channels = [codec for channel in CHANNELS.values() for codec in (channel.to_worker, channel.from_worker)]
    if any(struct in codec.types for codec in channels) and struct.__name__ not in {"Alive", "Leave", "Leaving"}:
        assert "cause" in {field.name for field in msgspec.structs.fields(struct)}
