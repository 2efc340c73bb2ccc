"""Norm, gate and rotation: kernels on a GPU, torch's own operations elsewhere.

Owns the choice, by where the numbers lie. Importing this imports no Triton: only the first use on a GPU does.
"""

from __future__ import annotations

from torch import Tensor

from rollplex.model.fused import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`."""
    if not x.is_cuda:
        return reference.rms_norm(x, weight, eps)
    from rollplex.model.fused.kernels import RmsNorm  # noqa: PLC0415 - Triton, on a GPU only

    return RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return, no-untyped-call]


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_mul`."""
    if not gate_up.is_cuda:
        return reference.silu_mul(gate_up)
    from rollplex.model.fused.kernels import SiluMul  # noqa: PLC0415 - Triton, on a GPU only

    return SiluMul.apply(gate_up)  # type: ignore[no-any-return, no-untyped-call]


def rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, heads: int, kv_heads: int, wide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.rotate`."""
    if not qkv.is_cuda:
        return reference.rotate(qkv, cos, sin, heads=heads, kv_heads=kv_heads, wide=wide)
    from rollplex.model.fused.kernels import Rotate  # noqa: PLC0415 - Triton, on a GPU only

    return Rotate.apply(qkv, cos, sin, heads, kv_heads, wide)  # type: ignore[no-any-return, no-untyped-call]
