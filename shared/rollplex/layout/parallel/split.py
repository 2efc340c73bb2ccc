"""Along which dimension tensor parallelism splits each stored parameter, and of which parts it is made.

Owns: the rule of every entry of the parameter table. Does not know: degrees, ranks, places.

    rows       output features. qkv is q | k | v and gate_up is gate | up: each part is split on its own, so that a
               rank's tensor is [q_r; k_r; v_r]. Embedding and lm_head by rows of the vocabulary. Biases of these.
    columns    input features: what follows in a pair (o, down, the merger's second matrix)
    whole      on every rank: norms, the patch embedding, and biases of layers split by columns, which are added once
               to the sum over ranks
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Final, Literal, TypeAlias

from rollplex.layout.parameters import ParameterTable, Stored
from rollplex.layout.shape import ModelShape

Axis: TypeAlias = Literal["rows", "columns", "whole"]
Range: TypeAlias = tuple[int, int]
"""[start, stop) along the axis."""
QKV: Final = ("q", "k", "v")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A range of an entry that is split on its own: a parameter of the training layout."""

    name: str
    """transformers' name; of the vision tower's qkv, which transformers keeps fused, with :q, :k or :v behind it."""
    size: int
    """Along the axis, padding included."""
    real: int
    """Along the axis, without padding, which is at the end."""
    shared_heads: int = 0
    """Of K and V: heads, each of which several rollout ranks hold if there are more ranks than heads. 0: others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """How one entry of the parameter table is split. Parts follow one another along the axis, without gaps."""

    entry: Stored
    axis: Axis
    parts: tuple[Part, ...]

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Of a tensor that holds `size` rows or columns of the entry."""
        match self.axis:
            case "rows" | "whole":
                return (size, *self.entry.shape[1:])
            case "columns":
                return (self.entry.shape[0], size)

    def numbers(self, size: int) -> int:
        """How many numbers `size` rows or columns are."""
        return prod(self.local_shape(size))


def splits(table: ParameterTable, shape: ModelShape) -> tuple[Split, ...]:
    """One for each entry of `table`, in its order.

    Raises:
        KeyError: an entry that no rule is known for: `table` is not of a model of `shape`'s kind.
    """
    return tuple(_split(entry, shape) for entry in table.entries)


def _split(entry: Stored, shape: ModelShape) -> Split:
    match entry.name.split("."):
        case [*_, "self_attn", "qkv_proj", _]:
            return _qkv(entry, (shape.heads, shape.kv_heads, shape.kv_heads), shape.head_dim)
        case ["visual", *_, "qkv_proj", _]:
            heads = shape.vision.heads
            return _qkv(entry, (heads, heads, heads), shape.vision.head_dim)
        case ["model", "embed_tokens", "weight"] | ["lm_head", "weight"]:
            return _along(entry, "rows")
        case [*_, "gate_up_proj" | "fc1", _] | ["visual", "merger", "mlp", "0", _]:
            return _along(entry, "rows")
        case [*_, "o_proj" | "down_proj" | "proj" | "fc2", kind] | ["visual", "merger", "mlp", "2", kind]:
            # A convolution's kernel is no second matrix of a pair: the patch embedding is on every rank.
            paired = kind == "weight" and len(entry.shape) == 2
            return _along(entry, "columns" if paired else "whole")
        case [*_, "input_layernorm" | "post_attention_layernorm" | "norm" | "norm1" | "norm2" | "ln_q", _]:
            return _along(entry, "whole")
        case _:
            raise KeyError(entry.name)


def _along(entry: Stored, axis: Axis) -> Split:
    """The parts are the pieces of the parameter table, each with the padding behind it."""
    total = entry.shape[1] if axis == "columns" else entry.shape[0]
    whole = (0, total)
    ranges = [piece.cols or whole if axis == "columns" else piece.rows for piece in entry.pieces]
    names = [piece.hf_name for piece in entry.pieces]
    return Split(entry=entry, axis=axis, parts=tuple(_parts(names, ranges, total)))


def _parts(names: Iterable[str], ranges: list[Range], total: int) -> Iterable[Part]:
    starts = [start for start, _ in ranges[1:]]
    for name, (start, stop), end in zip(names, ranges, [*starts, total], strict=True):
        yield Part(name=name, size=end - start, real=stop - start)


def _qkv(entry: Stored, heads: tuple[int, int, int], head_dim: int) -> Split:
    fused = len(entry.pieces) == 1
    names = [f"{entry.pieces[0].hf_name}:{label}" for label in QKV] if fused else [p.hf_name for p in entry.pieces]
    shared = (0, heads[1], heads[2])
    parts = (
        Part(name=name, size=count * head_dim, real=count * head_dim, shared_heads=0 if fused else kv)
        for name, count, kv in zip(names, heads, shared, strict=True)
    )
    return Split(entry=entry, axis="rows", parts=tuple(parts))
