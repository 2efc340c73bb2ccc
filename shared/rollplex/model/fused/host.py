"""The same functions as `kernels`, in torch's own operations, for hosts. Tests run the fused model on them."""

from __future__ import annotations

import torch
from torch import Tensor

from rollplex.model.fused import reference


def norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kernels.norm_forward`; float64 keeps its width."""
    return reference.rms_norm(x, weight, eps), torch.rsqrt(_wide(x).pow(2).mean(-1) + eps)


def norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """See `kernels.norm_backward`."""
    normed, scaled = _wide(x) * rstd[:, None], _wide(dy) * weight
    dx = rstd[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (_wide(dy) * normed.to(x.dtype)).sum(0).to(weight.dtype) if wanted else None


def gate_forward(gate_up: Tensor) -> Tensor:
    """See `kernels.gate_forward`."""
    return reference.silu_mul(gate_up)


def gate_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """See `kernels.gate_backward`."""
    gate, up = _wide(gate_up).chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    d_gate = _wide(dy) * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return torch.cat((d_gate, _wide(dy) * (gate * sigmoid).to(dy.dtype)), -1).to(dy.dtype)


def rotate_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, heads: int, kv_heads: int, wide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.rotate_forward`."""
    return reference.rotate(qkv, cos, sin, heads=heads, kv_heads=kv_heads, wide=wide)


def rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `kernels.rotate_backward`."""
    cos, sin = _wide(cos)[:, None], _wide(sin)[:, None]

    def turned(d: Tensor) -> Tensor:
        one, two = (_wide(d) * sin).chunk(2, -1)
        return (_wide(d) * cos + torch.cat((two, -one), -1)).to(d.dtype)

    return torch.cat((turned(dq), turned(dk), dv), 1).flatten(1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
