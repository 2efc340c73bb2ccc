"""Triton kernels of `reference`, forward and backward.

Owns launches. All tensors are contiguous. Numbers are float32 inside; roundings on the way are those of `reference`.
Sums over rows (the norm's weight gradient) go over fixed parts in fixed order: the same input gives the same bits.
"""

# ruff: noqa: ANN001, ANN202, N803, PLR0917
# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator,attr-defined"
# pyright: reportIndexIssue=false
# Kernels are Triton's language: their arguments are pointers and numbers of a type of its own.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TURNS = 16
"""Rows of one program of the norm's backward, which sums their part of the weight's gradient."""
COLUMNS = 1024


@triton.jit
def _norm_forward(x_ptr, w_ptr, y_ptr, rstd_ptr, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    raw = tl.load(x_ptr + row * width + at, mask=inside, other=0.0)
    x = raw.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x) / width + eps)
    weight = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
    normed = (x * rstd).to(raw.dtype).to(tl.float32)
    tl.store(y_ptr + row * width + at, (weight * normed).to(raw.dtype), mask=inside)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _norm_backward(
    dy_ptr,
    x_ptr,
    w_ptr,
    rstd_ptr,
    dx_ptr,
    part_ptr,
    rows,
    width,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    part = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    weight = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for turn in range(TURNS):
        row = part.to(tl.int64) * TURNS + turn
        here = inside & (row < rows)
        raw = tl.load(x_ptr + row * width + at, mask=here, other=0.0)
        dy = tl.load(dy_ptr + row * width + at, mask=here, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        normed = raw.to(tl.float32) * rstd
        scaled = dy * weight
        dx = rstd * (scaled - normed * (tl.sum(scaled * normed) / width))
        tl.store(dx_ptr + row * width + at, dx.to(raw.dtype), mask=here)
        if WEIGHT:
            total += dy * normed.to(raw.dtype).to(tl.float32)
    if WEIGHT:
        tl.store(part_ptr + part.to(tl.int64) * width + at, total, mask=inside)


@triton.jit
def _gate_forward(h_ptr, y_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    raw = tl.load(h_ptr + row * 2 * width + at, mask=inside, other=0.0)
    up = tl.load(h_ptr + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    gate = raw.to(tl.float32)
    act = (gate / (1.0 + tl.exp(-gate))).to(raw.dtype).to(tl.float32)
    tl.store(y_ptr + row * width + at, (act * up).to(raw.dtype), mask=inside)


@triton.jit
def _gate_backward(dy_ptr, h_ptr, dh_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    raw = tl.load(h_ptr + row * 2 * width + at, mask=inside, other=0.0)
    up = tl.load(h_ptr + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
    gate = raw.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    d_gate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    d_up = dy * (gate * sigmoid).to(raw.dtype).to(tl.float32)
    tl.store(dh_ptr + row * 2 * width + at, d_gate.to(raw.dtype), mask=inside)
    tl.store(dh_ptr + row * 2 * width + width + at, d_up.to(raw.dtype), mask=inside)


@triton.jit
def _rotate_forward(
    qkv_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr,
    HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr,
    TILE_H: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, TILE_H)[:, None]
    at = tl.arange(0, TILE_D)[None, :]
    narrow = at < HALF
    inside = (head < HEADS + 2 * KV) & narrow
    place = row * (HEADS + 2 * KV) * 2 * HALF + head * 2 * HALF + at
    one_raw = tl.load(qkv_ptr + place, mask=inside, other=0.0)
    two_raw = tl.load(qkv_ptr + place + HALF, mask=inside, other=0.0)
    angle = row * 2 * HALF + at
    cos_one = tl.load(cos_ptr + angle, mask=narrow, other=0.0).to(tl.float32)
    cos_two = tl.load(cos_ptr + angle + HALF, mask=narrow, other=0.0).to(tl.float32)
    sin_one = tl.load(sin_ptr + angle, mask=narrow, other=0.0).to(tl.float32)
    sin_two = tl.load(sin_ptr + angle + HALF, mask=narrow, other=0.0).to(tl.float32)
    one, two = one_raw.to(tl.float32), two_raw.to(tl.float32)
    a, b, c, d = one * cos_one, two * sin_one, two * cos_two, one * sin_two
    if not WIDE:
        a, b = a.to(one_raw.dtype).to(tl.float32), b.to(one_raw.dtype).to(tl.float32)
        c, d = c.to(one_raw.dtype).to(tl.float32), d.to(one_raw.dtype).to(tl.float32)
    first, second = (a - b).to(one_raw.dtype), (c + d).to(one_raw.dtype)
    to_q = row * HEADS * 2 * HALF + head * 2 * HALF + at
    is_q = (head < HEADS) & narrow
    tl.store(q_ptr + to_q, first, mask=is_q)
    tl.store(q_ptr + to_q + HALF, second, mask=is_q)
    to_k = row * KV * 2 * HALF + (head - HEADS) * 2 * HALF + at
    is_k = (head >= HEADS) & (head < HEADS + KV) & narrow
    tl.store(k_ptr + to_k, first, mask=is_k)
    tl.store(k_ptr + to_k + HALF, second, mask=is_k)
    to_v = row * KV * 2 * HALF + (head - HEADS - KV) * 2 * HALF + at
    is_v = (head >= HEADS + KV) & inside
    tl.store(v_ptr + to_v, one_raw, mask=is_v)
    tl.store(v_ptr + to_v + HALF, two_raw, mask=is_v)


@triton.jit
def _rotate_backward(
    dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, d_ptr,
    HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr,
    TILE_H: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, TILE_H)[:, None]
    at = tl.arange(0, TILE_D)[None, :]
    narrow = at < HALF
    of_q = row * HEADS * 2 * HALF + head * 2 * HALF + at
    is_q = (head < HEADS) & narrow
    of_k = row * KV * 2 * HALF + (head - HEADS) * 2 * HALF + at
    is_k = (head >= HEADS) & (head < HEADS + KV) & narrow
    of_v = row * KV * 2 * HALF + (head - HEADS - KV) * 2 * HALF + at
    is_v = (head >= HEADS + KV) & (head < HEADS + 2 * KV) & narrow
    one = tl.load(dq_ptr + of_q, mask=is_q, other=0.0).to(tl.float32)
    one += tl.load(dk_ptr + of_k, mask=is_k, other=0.0).to(tl.float32)
    two = tl.load(dq_ptr + of_q + HALF, mask=is_q, other=0.0).to(tl.float32)
    two += tl.load(dk_ptr + of_k + HALF, mask=is_k, other=0.0).to(tl.float32)
    angle = row * 2 * HALF + at
    cos_one = tl.load(cos_ptr + angle, mask=narrow, other=0.0).to(tl.float32)
    cos_two = tl.load(cos_ptr + angle + HALF, mask=narrow, other=0.0).to(tl.float32)
    sin_one = tl.load(sin_ptr + angle, mask=narrow, other=0.0).to(tl.float32)
    sin_two = tl.load(sin_ptr + angle + HALF, mask=narrow, other=0.0).to(tl.float32)
    first = one * cos_one + two * sin_two
    second = two * cos_two - one * sin_one
    first += tl.load(dv_ptr + of_v, mask=is_v, other=0.0).to(tl.float32)
    second += tl.load(dv_ptr + of_v + HALF, mask=is_v, other=0.0).to(tl.float32)
    place = row * (HEADS + 2 * KV) * 2 * HALF + head * 2 * HALF + at
    inside = (head < HEADS + 2 * KV) & narrow
    tl.store(d_ptr + place, first.to(d_ptr.dtype.element_ty), mask=inside)
    tl.store(d_ptr + place + HALF, second.to(d_ptr.dtype.element_ty), mask=inside)


def norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [N, W] -> y [N, W], 1 / rms float32 [N]."""
    rows, width = x.shape
    y, rstd = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    if rows:
        _norm_forward[(rows,)](x, weight, y, rstd, width, eps, BLOCK=triton.next_power_of_2(width), num_warps=8)
    return y, rstd


def norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and, if wanted, of the weight."""
    rows, width = x.shape
    dx = torch.empty_like(x)
    programs = max(1, triton.cdiv(rows, TURNS))
    parts = x.new_zeros(programs if wanted else 1, width, dtype=torch.float32)
    if rows:
        _norm_backward[(programs,)](
            dy, x, weight, rstd, dx, parts, rows, width,
            BLOCK=triton.next_power_of_2(width), TURNS=TURNS, WEIGHT=wanted, num_warps=8,
        )  # fmt: skip
    return dx, parts.sum(0).to(weight.dtype) if wanted else None


def gate_forward(gate_up: Tensor) -> Tensor:
    """[N, 2 I] -> [N, I]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(rows, width)
    if rows:
        _gate_forward[rows, triton.cdiv(width, COLUMNS)](gate_up, y, width, BLOCK=COLUMNS)
    return y


def gate_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of gate and up [N, 2 I]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    d = torch.empty_like(gate_up)
    if rows:
        _gate_backward[rows, triton.cdiv(width, COLUMNS)](dy, gate_up, d, width, BLOCK=COLUMNS)
    return d


def rotate_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, heads: int, kv_heads: int, wide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.rotate`."""
    rows, dim = cos.shape
    q = qkv.new_empty(rows, heads, dim)
    k, v = qkv.new_empty(rows, kv_heads, dim), qkv.new_empty(rows, kv_heads, dim)
    if rows:
        _rotate_forward[(rows,)](
            qkv, cos, sin, q, k, v, HEADS=heads, KV=kv_heads, HALF=dim // 2, WIDE=wide,
            TILE_H=triton.next_power_of_2(heads + 2 * kv_heads), TILE_D=triton.next_power_of_2(dim // 2),
        )  # fmt: skip
    return q, k, v


def rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradient of the projections [N, (heads + 2 kv_heads) D]."""
    rows, heads, dim = dq.shape
    kv_heads = dk.shape[1]
    d = dq.new_empty(rows, (heads + 2 * kv_heads) * dim)
    if rows:
        _rotate_backward[(rows,)](
            dq, dk, dv, cos, sin, d, HEADS=heads, KV=kv_heads, HALF=dim // 2,
            TILE_H=triton.next_power_of_2(heads + 2 * kv_heads), TILE_D=triton.next_power_of_2(dim // 2),
        )  # fmt: skip
    return d
