"""The parameter table: which bytes of a segment hold which parameter.

Owns: names, shapes, order, padding and alignment of the stored layout, which is SGLang's at TP = 1 (dumped from SGLang
0.5.17, `srt/models/qwen2_5_vl.py`), and how each of transformers' parameters lies inside a stored one. Does not know:
tensors, memory, how a table is filled. A Qwen2-VL's vision tower is named in the same manner; nothing of it is fused or
padded.

    stored                            transformers                              padding (zero, never written)
    qkv_proj.weight [(q+2kv)D, H]     q_proj | k_proj | v_proj, row ranges      none
    gate_up_proj.weight [2I, H]       gate_proj | up_proj, row ranges           none (text)
    vision gate_up_proj [2I', h]      gate at row 0, up at row I'               I' = I up to a multiple of 8
    vision down_proj [h, I']          columns 0..I                              columns I..I'
    embed_tokens, lm_head [V', H]     rows 0..V                                 V' = V up to a multiple of 64
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Final, Literal, TypeAlias

from rollplex.errors import ModelError
from rollplex.layout.shape import ModelShape
from rollplex.layout.vision import VisionShape

HEADER_BYTES: Final = 4096
"""One page in front of the actor weights (`rollplex.memory.header`)."""
ALIGN_BYTES: Final = 256
"""Of every entry, for aligned vector loads on a GPU."""
VOCAB_MULTIPLE: Final = 64
"""srt/layers/vocab_parallel_embedding.py: pad_vocab_size."""
VISION_MLP_MULTIPLE: Final = 8
"""srt/models/qwen2_5_vl.py: mlp_hidden_size in Qwen2_5_VisionTransformer."""
GRADIENTS: Final = "gradients"
"""Folder of a run directory: an arena of each step, `step_N.bin`, as `gradient_table` lays it out."""
ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float64": 8}
"""dtypes that weights may have, and the size of a number."""

Tower: TypeAlias = Literal["text", "vision"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One parameter of transformers inside a stored one: `stored[rows[0]:rows[1], cols[0]:cols[1]]`."""

    hf_name: str
    """As in `Qwen2_5_VLForConditionalGeneration.named_parameters()`."""
    hf_shape: tuple[int, ...]
    rows: tuple[int, int]
    """Range of the first dimension."""
    cols: tuple[int, int] | None = None
    """Range of the second dimension; None: all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One parameter as SGLang holds it: contiguous, row major, from `offset` on."""

    name: str
    """As in SGLang's `named_parameters()`."""
    shape: tuple[int, ...]
    """With padding."""
    offset: int
    """Bytes from the start of the segment; a multiple of 256."""
    size_bytes: int
    tower: Tower
    trainable: bool
    decay: bool
    """Weight decay applies: matrices, not norms and biases."""
    pieces: tuple[Piece, ...]
    tied: bool = False
    """This is the embedding and also the lm_head, which then has no entry of its own."""


@dataclass(frozen=True, kw_only=True)
class ParameterTable:
    """All entries of one segment, in the order of their offsets."""

    dtype: str
    header_bytes: int
    entries: tuple[Stored, ...]
    total_bytes: int
    """Of the segment: header, entries, alignment; a multiple of 256."""

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex) of `canonical_text`."""
        return hashlib.sha256(canonical_text(self).encode()).hexdigest()

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def trainable_entries(self) -> tuple[Stored, ...]:
        return tuple(entry for entry in self.entries if entry.trainable)

    def by_name(self, name: str) -> Stored:
        """The entry with SGLang's name `name`. Raises KeyError."""
        return self._names[name]

    def by_hf_name(self, hf_name: str) -> tuple[Stored, Piece]:
        """Where transformers' parameter `hf_name` lies. Raises KeyError."""
        return self._hf_names[hf_name]

    @cached_property
    def _names(self) -> dict[str, Stored]:
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def _hf_names(self) -> dict[str, tuple[Stored, Piece]]:
        return {piece.hf_name: (entry, piece) for entry in self.entries for piece in entry.pieces}


def parameter_table(
    shape: ModelShape, *, dtype: str, freeze_vision: bool, header_bytes: int = HEADER_BYTES
) -> ParameterTable:
    """The actor weights: text model, lm_head unless tied, vision tower, behind a header of `header_bytes`.

    Raises:
        ModelError: a dtype that weights cannot have.
    """
    _item_bytes(dtype)
    entries = [*_text_entries(shape), *_vision_entries(shape, trainable=not freeze_vision)]
    return _placed(entries, dtype, header_bytes)


def gradient_table(table: ParameterTable, *, dtype: str | None = None) -> ParameterTable:
    """A gradient arena: the trainable entries of `table`, no header, of its dtype unless `dtype` says another."""
    return _placed(table.trainable_entries, dtype or table.dtype, 0)


def reference_table(table: ParameterTable) -> ParameterTable:
    """The reference weights that differ from the actor's, i.e. the trainable entries; the frozen ones are read from
    the actor's segment. No header."""
    return _placed(table.trainable_entries, table.dtype, 0)


def with_entries(table: ParameterTable, entries: Iterable[Stored]) -> ParameterTable:
    """A table of these entries, each placed anew by its shape, behind the header of `table`."""
    return _placed(entries, table.dtype, table.header_bytes)


def canonical_text(table: ParameterTable) -> str:
    """What the hash is over: one line per entry and piece, every field, in order."""
    lines = [f"rollplex table 1 dtype={table.dtype} header={table.header_bytes} total={table.total_bytes}"]
    for entry in table.entries:
        flags = f"trainable={entry.trainable:d} decay={entry.decay:d} tied={entry.tied:d}"
        place = f"{entry.offset}+{entry.size_bytes}"
        lines.append(f"{entry.name} {_dims(entry.shape)} {place} {entry.tower} {flags}")
        for piece in entry.pieces:
            cols = "all" if piece.cols is None else f"{piece.cols[0]}:{piece.cols[1]}"
            lines.append(f"  {piece.hf_name} {_dims(piece.hf_shape)} {piece.rows[0]}:{piece.rows[1]} {cols}")
    return "\n".join(lines) + "\n"


def align(size_bytes: int) -> int:
    """The next multiple of 256."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _item_bytes(dtype: str) -> int:
    if dtype not in ITEM_BYTES:
        raise ModelError("Weights cannot have this dtype", got=dtype, needed=" or ".join(ITEM_BYTES))
    return ITEM_BYTES[dtype]


def _placed(entries: Iterable[Stored], dtype: str, header_bytes: int) -> ParameterTable:
    """Give every entry size and offset, one after the other, each 256-byte aligned."""
    item_bytes = _item_bytes(dtype)
    placed = []
    offset = align(header_bytes)
    for entry in entries:
        size_bytes = prod(entry.shape) * item_bytes
        placed.append(replace(entry, offset=offset, size_bytes=size_bytes))
        offset = align(offset + size_bytes)
    return ParameterTable(dtype=dtype, header_bytes=header_bytes, entries=tuple(placed), total_bytes=offset)


def vision_mlp_width(vision: VisionShape) -> int:
    """I' of the vision MLP: its width as stored."""
    return _up(vision.intermediate, VISION_MLP_MULTIPLE)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _entry(
    name: str, shape: tuple[int, ...], pieces: Iterable[Piece], tower: Tower, *, trainable: bool, tied: bool = False
) -> Stored:
    return Stored(
        name=name,
        shape=shape,
        offset=0,
        size_bytes=0,
        tower=tower,
        trainable=trainable,
        decay=len(shape) > 1,
        pieces=tuple(pieces),
        tied=tied,
    )


class _Tower:
    """Makes the entries of one tower from (SGLang prefix, transformers prefix)."""

    def __init__(self, tower: Tower, *, trainable: bool) -> None:
        self._tower: Tower = tower
        self._trainable = trainable

    def whole(self, name: str, hf_name: str, *shape: int) -> Stored:
        """Stored as transformers has it."""
        return self.padded_rows(name, hf_name, shape, shape[0])

    def linear(self, name: str, hf_name: str, rows: int, cols: int) -> Iterator[Stored]:
        """A weight and its bias, stored as transformers has them."""
        yield self.whole(f"{name}.weight", f"{hf_name}.weight", rows, cols)
        yield self.whole(f"{name}.bias", f"{hf_name}.bias", rows)

    def padded_rows(
        self, name: str, hf_name: str, hf_shape: tuple[int, ...], rows: int, *, tied: bool = False
    ) -> Stored:
        piece = Piece(hf_name=hf_name, hf_shape=hf_shape, rows=(0, hf_shape[0]))
        stored = (rows, *hf_shape[1:])
        return _entry(name, stored, [piece], self._tower, trainable=self._trainable, tied=tied)

    def padded_cols(self, name: str, hf_name: str, hf_shape: tuple[int, int], cols: int) -> Stored:
        part = None if cols == hf_shape[1] else (0, hf_shape[1])
        piece = Piece(hf_name=hf_name, hf_shape=hf_shape, rows=(0, hf_shape[0]), cols=part)
        return _entry(name, (hf_shape[0], cols), [piece], self._tower, trainable=self._trainable)

    def fused(self, name: str, parts: Iterable[tuple[str, int, int]], *width: int) -> Stored:
        """Row ranges one after the other. parts: (HF name, rows, rows with padding). width: () for a bias."""
        pieces = []
        row = 0
        for hf_name, rows, padded in parts:
            pieces.append(Piece(hf_name=hf_name, hf_shape=(rows, *width), rows=(row, row + rows)))
            row += padded
        return _entry(name, (row, *width), pieces, self._tower, trainable=self._trainable)


def _text_entries(shape: ModelShape) -> Iterator[Stored]:
    make = _Tower("text", trainable=True)
    hidden, wide = shape.hidden, shape.intermediate
    rows = _up(shape.vocab, VOCAB_MULTIPLE)
    hf = "model.language_model"
    embedding = (shape.vocab, hidden)
    yield make.padded_rows("model.embed_tokens.weight", f"{hf}.embed_tokens.weight", embedding, rows, tied=shape.tied)
    heads = (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads))
    for n in range(shape.layers):
        to, of = f"model.layers.{n}", f"{hf}.layers.{n}"
        for kind, width in (("weight", (hidden,)), ("bias", ())):
            parts = [(f"{of}.self_attn.{h}_proj.{kind}", c * shape.head_dim, c * shape.head_dim) for h, c in heads]
            yield make.fused(f"{to}.self_attn.qkv_proj.{kind}", parts, *width)
        o_proj = "self_attn.o_proj.weight"
        yield make.whole(f"{to}.{o_proj}", f"{of}.{o_proj}", hidden, shape.heads * shape.head_dim)
        gate_up = [(f"{of}.mlp.{p}_proj.weight", wide, wide) for p in ("gate", "up")]
        yield make.fused(f"{to}.mlp.gate_up_proj.weight", gate_up, hidden)
        yield make.whole(f"{to}.mlp.down_proj.weight", f"{of}.mlp.down_proj.weight", hidden, wide)
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield make.whole(f"{to}.{norm}", f"{of}.{norm}", hidden)
    yield make.whole("model.norm.weight", f"{hf}.norm.weight", hidden)
    if not shape.tied:
        yield make.padded_rows("lm_head.weight", "lm_head.weight", embedding, rows)


def _vision_entries(shape: ModelShape, *, trainable: bool) -> Iterator[Stored]:
    make = _Tower("vision", trainable=trainable)
    vision = shape.vision
    hidden, merger = vision.hidden, vision.merger_width
    hf = "model.visual"
    kernel = (vision.temporal_patch, vision.patch, vision.patch)
    patch_embed = "patch_embed.proj.weight"
    yield make.whole(f"visual.{patch_embed}", f"{hf}.{patch_embed}", hidden, vision.in_channels, *kernel)
    for n in range(vision.depth):
        to, of = f"visual.blocks.{n}", f"{hf}.blocks.{n}"
        for norm in ("norm1", "norm2"):
            yield from _vision_norm(make, f"{to}.{norm}", f"{of}.{norm}", vision)
        yield from make.linear(f"{to}.attn.qkv_proj", f"{of}.attn.qkv", 3 * hidden, hidden)
        yield from make.linear(f"{to}.attn.proj", f"{of}.attn.proj", hidden, hidden)
        yield from _vision_mlp(make, f"{to}.mlp", f"{of}.mlp", vision)
    yield from _vision_norm(make, "visual.merger.ln_q", f"{hf}.merger.ln_q", vision)
    yield from make.linear("visual.merger.mlp.0", f"{hf}.merger.mlp.0", merger, merger)
    yield from make.linear("visual.merger.mlp.2", f"{hf}.merger.mlp.2", vision.out_hidden, merger)


def _vision_norm(make: _Tower, to: str, of: str, vision: VisionShape) -> Iterator[Stored]:
    for kind in ("weight",) if vision.architecture == "qwen2_5_vl" else ("weight", "bias"):
        yield make.whole(f"{to}.{kind}", f"{of}.{kind}", vision.hidden)


def _vision_mlp(make: _Tower, to: str, of: str, vision: VisionShape) -> Iterator[Stored]:
    hidden, wide = vision.hidden, vision.intermediate
    if vision.architecture == "qwen2_vl":
        yield from make.linear(f"{to}.fc1", f"{of}.fc1", wide, hidden)
        yield from make.linear(f"{to}.fc2", f"{of}.fc2", hidden, wide)
        return
    padded = vision_mlp_width(vision)
    for kind, width in (("weight", (hidden,)), ("bias", ())):
        gate_up = [(f"{of}.{p}_proj.{kind}", wide, padded) for p in ("gate", "up")]
        yield make.fused(f"{to}.gate_up_proj.{kind}", gate_up, *width)
    yield make.padded_cols(f"{to}.down_proj.weight", f"{of}.down_proj.weight", (hidden, wide), padded)
    yield make.whole(f"{to}.down_proj.bias", f"{of}.down_proj.bias", hidden)
