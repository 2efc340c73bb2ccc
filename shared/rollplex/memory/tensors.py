"""Tensors over segments, without a copy.

Owns: the way from bytes of a mapping to torch tensors, and from stored parameters to transformers' names. Of this
package only it and `digest_device` may import torch. Does not know: what a forward does with them, who may write.

A tensor keeps the bytes mapped: `Mapping.close` refuses while one is alive. One over a GPU's memory is of the GPU that
the mapping was made for, which computes on it, wherever the bytes lie: a segment of another GPU is reached through its
addresses alone, and nothing here makes a context there.
"""

from __future__ import annotations

from collections.abc import Mapping as MappingOf
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from rollplex.errors import SegmentError
from rollplex.layout.kv import Block, KvLayout
from rollplex.layout.optimizer import STEP_OFFSET, OptimizerTable
from rollplex.layout.parameters import ParameterTable, Stored
from rollplex.memory.dlpack import CUDA, Capsule
from rollplex.memory.segment import Mapping
from rollplex.protocol.common import Memory

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""By the names that tables use (`rollplex.layout.parameters.ITEM_BYTES`)."""


def tensor(mapping: Mapping, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor whose memory is the segment's, from byte `offset` on, on the device that it is mapped for.

    Raises:
        SegmentError: outside the segment, or `offset` is not a multiple of the size of a number.
    """
    if offset % dtype.itemsize:
        raise SegmentError("A tensor is not aligned", got=f"offset {offset}", needed=f"a multiple of {dtype.itemsize}")
    size_bytes = prod(shape) * dtype.itemsize
    if mapping.memory is Memory.CUDA:
        view = mapping.device_view(offset, size_bytes)
        if not size_bytes:
            return torch.empty(shape, dtype=dtype, device=torch.device("cuda", view.device))
        return _over(view).view(dtype).view(shape)
    part = mapping.view(offset, size_bytes)
    if not size_bytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(part, dtype=dtype).view(shape)


def require_mapped(mapping: Mapping, tensors: MappingOf[str, Tensor]) -> None:
    """Whether every tensor lies in the segment: nobody has made a copy of the weights for itself.

    Raises:
        SegmentError: names the first that does not.
    """
    first = tensor(mapping, 0, (1,), torch.uint8).data_ptr()
    for name, value in tensors.items():
        if not first <= value.data_ptr() < first + mapping.size_bytes:
            raise SegmentError(
                "A parameter is not in the segment that holds the weights",
                got="storage of its own",
                needed="a view of the mapped segment: the weights exist once",
                where=name,
            )


def views(mapping: Mapping, table: ParameterTable) -> dict[str, Tensor]:
    """Every entry of `table` by SGLang's name, in its stored shape with padding, in the order of the table.

    Raises:
        SegmentError: the segment is smaller than the table.
    """
    _fits(mapping, table.total_bytes)
    dtype = DTYPES[table.dtype]
    return {entry.name: tensor(mapping, entry.offset, entry.shape, dtype) for entry in table.entries}


def hf_views(stored: MappingOf[str, Tensor], table: ParameterTable) -> dict[str, Tensor]:
    """Every parameter under transformers' name, as a view on `stored`, in the order of the table.

    Shapes are transformers'; padding is outside. All are contiguous but the vision tower's down_proj, whose rows are
    further apart than they are long where padded. Gradients and optimizer states of stored shape go the same way.
    """
    return {
        piece.hf_name: _piece(stored[entry.name], piece.rows, piece.cols)
        for entry in table.entries
        for piece in entry.pieces
    }


def padding(stored: MappingOf[str, Tensor], table: ParameterTable) -> dict[str, list[Tensor]]:
    """The numbers of each entry that belong to no parameter, as views: always 0. Entries without padding: []."""
    return {entry.name: _gaps(stored[entry.name], entry) for entry in table.entries}


@dataclass(frozen=True, kw_only=True, slots=True)
class KvViews:
    """One actor prefix unit (`rollplex.layout.kv`). Lists are by layer; shapes [rows, kv_heads, tokens, head_dim],
    hidden states [rows, hidden]."""

    keys: list[Tensor]
    values: list[Tensor]
    last_hidden: Tensor
    d_keys: list[Tensor]
    d_values: list[Tensor]
    d_last_hidden: Tensor
    gradients: Tensor
    """All of d_* and what lies between as bytes (uint8), to be zeroed in one go."""


def kv_views(mapping: Mapping, layout: KvLayout) -> KvViews:
    """Raises SegmentError if the segment is smaller than the layout."""
    _fits(mapping, layout.total_bytes)
    dtype = DTYPES[layout.dtype]

    def over(block: Block) -> Tensor:
        return tensor(mapping, block.offset, block.shape, dtype)

    layers = range(layout.layers)
    return KvViews(
        keys=[over(layout.key(n)) for n in layers],
        values=[over(layout.value(n)) for n in layers],
        last_hidden=over(layout.last_hidden),
        d_keys=[over(layout.d_key(n)) for n in layers],
        d_values=[over(layout.d_value(n)) for n in layers],
        d_last_hidden=over(layout.d_last_hidden),
        gradients=tensor(mapping, layout.gradient_offset, (layout.gradient_bytes,), torch.uint8),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerViews:
    """Optimizer state (`rollplex.layout.optimizer`)."""

    step: Tensor
    """int64, no dimensions."""
    states: dict[str, dict[str, Tensor]]
    """By kind, then by SGLang's name of the entry; stored shape."""


def optimizer_views(mapping: Mapping, table: OptimizerTable) -> OptimizerViews:
    """Raises SegmentError if the segment is smaller than the table."""
    _fits(mapping, table.total_bytes)
    dtype = DTYPES[table.dtype]
    states: dict[str, dict[str, Tensor]] = {}
    for state in table.states:
        states.setdefault(state.kind, {})[state.parameter] = tensor(mapping, state.offset, state.shape, dtype)
    return OptimizerViews(step=tensor(mapping, STEP_OFFSET, (), torch.int64), states=states)


def _over(view: Any) -> Tensor:
    """Bytes of a mapping as a tensor of its GPU, which keeps `view` alive as long as any tensor looks at them."""
    capsule = Capsule(view, kind=CUDA, number=view.device, address=view.address, size_bytes=view.size_bytes)
    try:
        found: Tensor = from_dlpack(capsule.given)
    except BaseException:
        capsule.cancel()
        raise
    if found.data_ptr() != view.address:
        raise SegmentError(
            "torch has copied a segment instead of looking at it",
            got=f"memory at {found.data_ptr():#x}",
            needed=f"at {view.address:#x}",
        )
    return found


def _fits(mapping: Mapping, total_bytes: int) -> None:
    if mapping.size_bytes < total_bytes:
        raise SegmentError(
            "A segment is smaller than what it should hold", got=f"{mapping.size_bytes} bytes", needed=f"{total_bytes}"
        )


def _piece(stored: Tensor, rows: tuple[int, int], cols: tuple[int, int] | None) -> Tensor:
    part = stored[rows[0] : rows[1]]
    return part if cols is None else part[:, cols[0] : cols[1]]


def _gaps(stored: Tensor, entry: Stored) -> list[Tensor]:
    gaps = []
    row = 0
    for piece in entry.pieces:
        gaps.append(stored[row : piece.rows[0]])
        if piece.cols is not None:
            gaps += [stored[piece.rows[0] : piece.rows[1], : piece.cols[0]]]
            gaps += [stored[piece.rows[0] : piece.rows[1], piece.cols[1] :]]
        row = piece.rows[1]
    gaps.append(stored[row:])
    return [gap for gap in gaps if gap.numel()]
