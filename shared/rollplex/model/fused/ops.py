"""Norm, gate and rotation with their gradients: by kernels on a GPU, by torch's own operations elsewhere.

Owns what each saves for its backward, and the choice, by where the numbers lie. Importing this imports no Triton: only
the first use on a GPU does.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor
from torch.autograd import Function

from rollplex.model.fused import host


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`. Saves x and one number per row."""
    out: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_mul`; any leading dimensions. Saves its input."""
    out: Tensor = _SiluMul.apply(gate_up)  # type: ignore[no-untyped-call]
    return out


def rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, heads: int, kv_heads: int, wide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.rotate`. Saves cos and sin only."""
    out: tuple[Tensor, Tensor, Tensor] = _Rotate.apply(  # type: ignore[no-untyped-call]
        qkv, cos, sin, heads, kv_heads, wide
    )
    return out


def _module(x: Tensor) -> ModuleType:
    if not x.is_cuda:
        return host
    from rollplex.model.fused import kernels  # noqa: PLC0415 - Triton, on a GPU only

    return kernels


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        y, rstd = _module(x).norm_forward(x.flatten(0, -2), weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        out: Tensor = y.view_as(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, d_weight = _module(x).norm_backward(
            grads[0].contiguous().flatten(0, -2), x.flatten(0, -2), weight, rstd, wanted=bool(ctx.needs_input_grad[1])
        )
        return dx.view_as(x), d_weight, None


class _SiluMul(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        out: Tensor = _module(gate_up).gate_forward(gate_up.flatten(0, -2))
        return out.view(*gate_up.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        d: Tensor = _module(gate_up).gate_backward(grads[0].contiguous().flatten(0, -2), gate_up.flatten(0, -2))
        return d.view_as(gate_up)


class _Rotate(Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, wide: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        out: tuple[Tensor, Tensor, Tensor] = _module(qkv).rotate_forward(
            qkv.contiguous(), cos, sin, heads=heads, kv_heads=kv_heads, wide=wide
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dq, dk, dv = (grad.contiguous() for grad in grads)
        return _module(dq).rotate_backward(dq, dk, dv, cos, sin), None, None, None, None, None
