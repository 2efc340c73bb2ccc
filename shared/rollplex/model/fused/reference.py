"""What the kernels compute, in torch's own operations: for hosts, and to hold the kernels to.

Roundings are transformers' own: each product of a text rotation and each factor of a gate is rounded to the tensors'
dtype, a vision rotation only at its end. Does not know: modules, which of the two is used.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., W] / rms(x) * weight [W]; the norm in float32 (float64 stays), the product in the dtype of x."""
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[N, 2 I], gate then up, -> silu(gate) * up, [N, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, heads: int, kv_heads: int, wide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits projections and turns q and k.

    Args:
        qkv: [N, (heads + 2 kv_heads) D].
        cos, sin: [N, D].
        wide: in float32, rounded once (vision); otherwise each product is rounded (text).

    Returns:
        q [N, heads, D], k and v [N, kv_heads, D], contiguous.
    """
    q, k, v = torch.split(qkv.view(qkv.shape[0], heads + 2 * kv_heads, -1), [heads, kv_heads, kv_heads], 1)
    dtype = qkv.dtype
    inner = torch.float32 if wide and dtype != torch.float64 else dtype
    cos, sin = cos.to(inner)[:, None], sin.to(inner)[:, None]

    def turned(x: Tensor) -> Tensor:
        x = x.to(inner)
        one, two = x.chunk(2, -1)
        return (x * cos + torch.cat((-two, one), -1) * sin).to(dtype)

    return turned(q), turned(k), v.contiguous()
