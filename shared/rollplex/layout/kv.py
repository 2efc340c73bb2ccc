"""The segment of one actor prefix unit: K, V and the last hidden state, and their gradients.

Owns: where each block lies. Does not know: who writes it, tensors, memory.

    [ k0 v0 k1 v1 … h | dk0 dv0 dk1 dv1 … dh ]      each block 256-byte aligned; the second half is zeroed as one range
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from rollplex.errors import ModelError
from rollplex.layout.parameters import ITEM_BYTES, align
from rollplex.layout.shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One contiguous array, row major."""

    offset: int
    """Bytes from the start of the segment."""
    shape: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True)
class KvLayout:
    """Layout for `rows` prompts (copies included) that are right-padded to `tokens`.

    Keys and values are [rows, kv_heads, tokens, head_dim], keys after the rotary embedding; the last hidden state is
    [rows, hidden], after the final norm, at each prompt's last token.

    Raises:
        ModelError: a dtype that weights cannot have, or no rows or tokens.
    """

    shape: ModelShape
    rows: int
    tokens: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ModelError("Keys and values cannot have this dtype", got=self.dtype, needed=" or ".join(ITEM_BYTES))
        if self.rows < 1 or self.tokens < 1:
            raise ModelError("A prefix unit is empty", got=f"{self.rows} rows of {self.tokens} tokens", needed="1 of 1")

    @property
    def layers(self) -> int:
        return self.shape.layers

    def key(self, layer: int) -> Block:
        return self._kv(2 * self._checked(layer))

    def value(self, layer: int) -> Block:
        return self._kv(2 * self._checked(layer) + 1)

    @property
    def last_hidden(self) -> Block:
        return self._block(2 * self.layers * self._kv_stride, (self.rows, self.shape.hidden))

    def d_key(self, layer: int) -> Block:
        return self._gradient(self.key(layer))

    def d_value(self, layer: int) -> Block:
        return self._gradient(self.value(layer))

    @property
    def d_last_hidden(self) -> Block:
        return self._gradient(self.last_hidden)

    @property
    def gradient_offset(self) -> int:
        """Where the gradients begin; they go to the end."""
        hidden = self.last_hidden
        return hidden.offset + align(hidden.size_bytes)

    @property
    def gradient_bytes(self) -> int:
        return self.gradient_offset

    @property
    def total_bytes(self) -> int:
        return 2 * self.gradient_offset

    @property
    def _kv_shape(self) -> tuple[int, ...]:
        return (self.rows, self.shape.kv_heads, self.tokens, self.shape.head_dim)

    @property
    def _kv_stride(self) -> int:
        return align(prod(self._kv_shape) * ITEM_BYTES[self.dtype])

    def _kv(self, index: int) -> Block:
        return self._block(index * self._kv_stride, self._kv_shape)

    def _block(self, offset: int, shape: tuple[int, ...]) -> Block:
        return Block(offset=offset, shape=shape, size_bytes=prod(shape) * ITEM_BYTES[self.dtype])

    def _gradient(self, block: Block) -> Block:
        return Block(offset=self.gradient_offset + block.offset, shape=block.shape, size_bytes=block.size_bytes)

    def _checked(self, layer: int) -> int:
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} of {self.layers}")
        return layer
