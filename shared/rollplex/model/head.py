"""The output layer: logits from hidden states. Rollout, reference and trainer all make them here.

Logits of half-precision weights are float32 (ADR 0026). A product of two bfloat16 numbers is exact in float32, and sums
are kept there anyway; a logit written down in bfloat16 is off by up to 2^-9 of itself, 0.03 at 16, and each side of a
run rounds another number.

Does not know: what log-probabilities are made of logits, which ids may be sampled.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from rollplex.model.attention import softmax_dtype

WIDENED_BYTES: Final = 16 * 2**20
"""On a host, how much of the weight is widened at a time. Part of what decides bits."""


def output_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits of the output layer.

    The gradients are those of a matrix product in the dtype of the weights.

    Args:
        hidden: [..., H] after the final norm.
        weight: [V, H], in the same dtype.

    Returns:
        [..., V]; float32 for half precisions, else in the dtype.
    """
    if softmax_dtype(weight.dtype) == weight.dtype:
        return F.linear(hidden, weight)
    rows = hidden.flatten(0, -2)
    apply: Any = _Widened.apply if torch.is_grad_enabled() else _wide
    logits: Tensor = apply(rows, weight)
    return logits.view(*hidden.shape[:-1], weight.shape[0])


def _wide(hidden: Tensor, weight: Tensor) -> Tensor:
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    size = max(1, WIDENED_BYTES // (4 * weight.shape[1]))  # torch has no such product on a host
    logits = hidden.new_empty(len(hidden), len(weight), dtype=torch.float32)
    rows = hidden.float()
    for start in range(0, len(weight), size):
        logits[:, start : start + size] = rows @ weight[start : start + size].float().t()
    return logits


class OutputLayer(nn.Module):
    """In the place of transformers', for decoding. Log-probabilities are made from its `weight` (`logprob`)."""

    def __init__(self, weight: nn.Parameter) -> None:
        """weight: [V, H]."""
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        """See `output_logits`."""
        return output_logits(hidden, self.weight)


class _Widened(torch.autograd.Function):
    """[N, H] and [V, H] in half precision to [N, V] in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return _wide(hidden, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        d_logits = grads[0].to(weight.dtype)
        d_hidden = d_logits @ weight if ctx.needs_input_grad[0] else None
        d_weight = d_logits.t() @ hidden if ctx.needs_input_grad[1] else None
        return d_hidden, d_weight
