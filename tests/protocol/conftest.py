"""Messages of every kind, made from their own type descriptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from msgspec import inspect

MAX_ITEMS = 3
MAX_DEPTH_TEXT = 12


def values(info: inspect.Type) -> st.SearchStrategy[Any]:  # noqa: PLR0911 - one case per type
    """Values that a type allows, with small collections, texts and blobs."""
    match info:
        case inspect.StructType():
            return st.builds(info.cls, **{field.name: values(field.type) for field in info.fields})
        case inspect.UnionType():
            return st.one_of([values(part) for part in info.types])
        case inspect.EnumType():
            return st.sampled_from(list(info.cls))
        case inspect.VarTupleType():
            return st.lists(values(info.item_type), max_size=_limit(info.max_length, MAX_ITEMS)).map(tuple)
        case inspect.TupleType():
            return st.tuples(*(values(item) for item in info.item_types))
        case inspect.DictType():
            return st.dictionaries(values(info.key_type), values(info.value_type), max_size=MAX_ITEMS)
        case inspect.IntType():
            return st.integers(info.ge if info.ge is not None else -(2**63), info.le if info.le is not None else 2**63)
        case inspect.FloatType():
            low = info.ge if info.ge is not None else info.gt
            return st.floats(low, info.le, exclude_min=info.gt is not None, allow_nan=False)
        case inspect.StrType():
            return st.text(max_size=_limit(info.max_length, MAX_DEPTH_TEXT))
        case inspect.BytesType():
            return st.binary(max_size=_limit(info.max_length, MAX_DEPTH_TEXT))
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case _:
            raise AssertionError(info)


def _limit(bound: int | None, small: int) -> int:
    return small if bound is None else min(bound, small)


@pytest.fixture(scope="session")
def messages() -> Callable[[Any], st.SearchStrategy[Any]]:
    """A strategy for any message of a union."""
    return lambda union: values(inspect.type_info(union))
