"""Norm, gate and rotation with their gradients: by kernels on a GPU, by torch's own operations elsewhere.

Owns what each saves for its backward, and the choice, by where the numbers lie. A norm or a gate that feeds a product
is not kept: its backward makes it again from what it was made of, which costs one pass over memory and saves two fifths
of what a layer would hold. Importing this imports no Triton: only the first use on a GPU does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor
from torch.autograd import Function

from rollplex.model.fused import host


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`. Saves x and one number per row."""
    out: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """linear(rms_norm(x, norm, eps), weight, bias). Saves x and one number per row."""
    out: Tensor = _NormLinear.apply(x, norm, eps, weight, bias)  # type: ignore[no-untyped-call]
    return out


def norm_linears(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weights: Sequence[Tensor],
    *,
    biases: Sequence[Tensor] = (),
    add: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Several linear layers over one rms_norm, one behind the other: [..., W] -> [..., sum of their widths]. Saves x
    and one number per row.

    Args:
        weights: whose storage may lie apart. biases: as many, or none.
        add: of a rank that has a part of each layer: sums in place, over the ranks, what they have of the gradient of
            the norm's output. None: all of it is here.
    """
    out: Tensor = _NormLinears.apply(x, norm, eps, add, len(weights), *weights, *biases)  # type: ignore[no-untyped-call]
    return out


def gate_linear(gate_up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """linear(silu_mul(gate_up), weight, bias). Saves gate_up."""
    out: Tensor = _GateLinear.apply(gate_up, weight, bias)  # type: ignore[no-untyped-call]
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


class _NormLinear(Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        x = x.contiguous()
        y, rstd = _module(x).norm_forward(x.flatten(0, -2), norm, eps)
        ctx.save_for_backward(x, norm, weight, rstd)
        ctx.eps = eps
        return F.linear(y, weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, weight, rstd = ctx.saved_tensors
        flat, d = x.flatten(0, -2), grads[0].flatten(0, -2)
        module = _module(x)
        d_weight, d_bias = _linear_gradients(
            d, lambda: module.norm_forward(flat, norm, ctx.eps)[0], ctx.needs_input_grad[3], ctx.needs_input_grad[4]
        )
        dx, d_norm = module.norm_backward(d @ weight, flat, norm, rstd, wanted=bool(ctx.needs_input_grad[1]))
        return dx.view_as(x), d_norm, None, d_weight, d_bias


class _NormLinears(Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any,
        x: Tensor,
        norm: Tensor,
        eps: float,
        add: Callable[[Tensor], object] | None,
        count: int,
        *layers: Tensor,
    ) -> Tensor:
        x = x.contiguous()
        weights, biases = layers[:count], layers[count:]
        y, rstd = _module(x).norm_forward(x.flatten(0, -2), norm, eps)
        ctx.save_for_backward(x, norm, rstd, *weights)
        ctx.eps, ctx.add, ctx.biased = eps, add, bool(biases)
        out = y.new_empty(y.shape[0], sum(len(weight) for weight in weights))
        for number, part in enumerate(_columns(out, weights)):
            if biases:
                torch.addmm(biases[number], y, weights[number].t(), out=part)
            else:
                torch.mm(y, weights[number].t(), out=part)
        whole: Tensor = out.view(*x.shape[:-1], -1)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, norm, rstd, *weights = ctx.saved_tensors
        flat = x.flatten(0, -2)
        module = _module(x)
        parts = _columns(grads[0].contiguous().flatten(0, -2), weights)
        wanted = ctx.needs_input_grad[5:]
        d_weights: list[Tensor | None] = [None for _ in weights]
        if any(wanted[: len(weights)]):
            y = module.norm_forward(flat, norm, ctx.eps)[0]
            d_weights = [d.t() @ y if want else None for d, want in zip(parts, wanted, strict=False)]
        d_biases = [d.sum(0) if want else None for d, want in zip(parts, wanted[len(weights) :], strict=False)]
        dy = parts[0] @ weights[0]
        for d, weight in zip(parts[1:], weights[1:], strict=True):
            dy.addmm_(d, weight)
        if ctx.add is not None:
            ctx.add(dy)
        dx, d_norm = module.norm_backward(dy, flat, norm, rstd, wanted=bool(ctx.needs_input_grad[1]))
        return dx.view_as(x), d_norm, None, None, None, *d_weights, *d_biases


def _columns(whole: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """What each linear layer has of the columns [N, sum of widths]."""
    return list(whole.split_with_sizes([len(weight) for weight in weights], 1))


class _GateLinear(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up, weight)
        return F.linear(_module(gate_up).gate_forward(gate_up.flatten(0, -2)), weight, bias).view(
            *gate_up.shape[:-1], -1
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weight = ctx.saved_tensors
        flat, d = gate_up.flatten(0, -2), grads[0].flatten(0, -2)
        module = _module(gate_up)
        d_weight, d_bias = _linear_gradients(
            d, lambda: module.gate_forward(flat), ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        )
        return module.gate_backward(d @ weight, flat).view_as(gate_up), d_weight, d_bias


def _linear_gradients(
    d: Tensor, make_input: Callable[[], Tensor], weight: object, bias: object
) -> tuple[Tensor | None, Tensor | None]:
    """Of weight and bias of a linear layer, as far as they are wanted; d [N, out]."""
    return d.t() @ make_input() if weight else None, d.sum(0) if bias else None


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
