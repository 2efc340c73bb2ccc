"""The layout of one prefix unit's keys and values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollplex.errors import ModelError
from rollplex.layout.kv import KvLayout
from rollplex.layout.shape import ModelShape, read_shape


@pytest.fixture
def shape(tiny: dict[str, Any], folder: Callable[..., Path]) -> ModelShape:
    return read_shape(folder(tiny))


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (3, 37), (2, 256)])
@pytest.mark.parametrize(("dtype", "item_bytes"), [("float32", 4), ("bfloat16", 2), ("float64", 8)])
def test_blocks_are_aligned_disjoint_and_fill_the_segment(
    shape: ModelShape, rows: int, tokens: int, dtype: str, item_bytes: int
) -> None:
    layout = KvLayout(shape, rows, tokens, dtype)
    layers = range(shape.layers)
    forward = [block for n in layers for block in (layout.key(n), layout.value(n))] + [layout.last_hidden]
    backward = [block for n in layers for block in (layout.d_key(n), layout.d_value(n))] + [layout.d_last_hidden]
    end = 0
    for block in [*forward, *backward]:
        assert block.offset % 256 == 0
        assert 0 <= block.offset - end < 256
        end = block.offset + block.size_bytes
    assert 0 <= layout.total_bytes - end < 256
    assert backward[0].offset == layout.gradient_offset
    assert layout.gradient_offset + layout.gradient_bytes == layout.total_bytes
    assert {block.shape for block in forward[:-1]} == {(rows, 2, tokens, 8)}
    assert {block.size_bytes for block in forward[:-1]} == {rows * 2 * tokens * 8 * item_bytes}
    assert layout.last_hidden.shape == (rows, 48)
    assert [b.shape for b in forward] == [b.shape for b in backward]


def test_a_layer_that_does_not_exist_is_an_index_error(shape: ModelShape) -> None:
    layout = KvLayout(shape, 1, 1, "float32")
    for layer in (-1, 2):
        for block in (layout.key, layout.value, layout.d_key, layout.d_value):
            with pytest.raises(IndexError):
                block(layer)


def test_empty_units_and_strange_dtypes_are_refused(shape: ModelShape) -> None:
    for rows, tokens, dtype in ((0, 1, "float32"), (1, 0, "float32"), (1, 1, "int8")):
        with pytest.raises(ModelError):
            KvLayout(shape, rows, tokens, dtype)
