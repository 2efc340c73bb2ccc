"""Attention that never writes its weights down: forward with the log of the sum of exponentials, and its backward.

Owns which of torch's kernels are called, and in which layout they want things. Every function takes tokens first:

    name    shape         meaning
    q       [N, h, D]     queries; the last dimension must be contiguous, the others may have any stride
    k, v    [M, kv, D]    keys and values, h a multiple of kv: neither is expanded
    out     [N, h, D]
    lse     [h, N]        log of the sum of exp(scores) of each query, float32 (float64 for float64)

A backward takes `out` and `lse` of the whole softmax, of which the keys given may be a part: with p = exp(score - lse)
and delta = sum(d_out * out), the gradients of a part need nothing of the others. So attention over two sets of keys is
two forwards that are merged, and two backwards with what they were merged to, exactly.

On a GPU these are the FlashAttention kernels that torch brings, for half precision only; their backward is
deterministic if torch is told to be. On a host one sequence at a time, in any precision, for tests and small models.
Nothing falls back to another kernel: what they cannot do is an error (`rollplex.memory.predict.packs_suffix` says who
calls them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rollplex.errors import EngineError

aten: Any = torch.ops.aten
Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Of q, k and v."""


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Sequences that lie one after the other in [N]; none is empty.

    boundaries: int32 [n + 1] on the device, from 0 to N. lengths: the same on the host.
    """

    boundaries: Tensor
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        # From 2 on: for a single query the forward turns heads into queries, and the log-sum-exp with them.
        return max(2, *self.lengths)


def one(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scaling: float) -> tuple[Tensor, Tensor]:
    """All queries see all keys, or if `causal` those up to their own place. Returns (out, lse)."""
    parts = (_heads_first(q), _heads_first(k), _heads_first(v))
    if q.is_cuda:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(*parts, 0.0, causal, False, scale=scaling)  # noqa: SLF001
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*parts, 0.0, causal, scale=scaling)  # noqa: SLF001
    return out[0].transpose(0, 1), _checked(lse[0], q)


def one_backward(  # noqa: PLR0917 - the order of torch's own backward
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scaling: float
) -> Gradients:
    """Of `one`; see above for `out` and `lse`."""
    d_first, q_first, k_first, v_first, out_first = (_heads_first(t) for t in (d_out, q, k, v, out))
    rows = lse[None].contiguous()
    if q.is_cuda:
        grads = aten._scaled_dot_product_flash_attention_backward(  # noqa: SLF001
            d_first, q_first, k_first, v_first, out_first, rows, None, None, q.shape[0], k.shape[0], 0.0, causal,
            _no_dropout(q), _no_dropout(q), scale=scaling,
        )  # fmt: skip
    else:
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(  # noqa: SLF001
            d_first, q_first, k_first, v_first, out_first, rows, 0.0, causal, scale=scaling
        )
    d_q, d_k, d_v = (grad[0].transpose(0, 1) for grad in grads)
    return d_q, d_k, d_v


def many(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, *, scaling: float) -> tuple[Tensor, Tensor]:
    """Causal attention within each sequence; q, k and v have the same tokens. Returns (out, lse)."""
    if q.is_cuda:
        out, lse, *_ = aten._flash_attention_forward(  # noqa: SLF001
            q, k, v, sequences.boundaries, sequences.boundaries, sequences.longest, sequences.longest,
            0.0, True, False, scale=scaling,
        )  # fmt: skip
        return out, _checked(lse, q)
    parts = zip(*(torch.split(t, [*sequences.lengths]) for t in (q, k, v)), strict=True)
    outs = [one(*part, causal=True, scaling=scaling) for part in parts]
    return torch.cat([out for out, _ in outs]), torch.cat([lse for _, lse in outs], 1)


def many_backward(  # noqa: PLR0917 - the order of torch's own backward
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: Sequences, *, scaling: float
) -> Gradients:
    """Of `many`; see above for `out` and `lse`."""
    if q.is_cuda:
        grads: Gradients = aten._flash_attention_backward(  # noqa: SLF001
            d_out, q, k, v, out, lse.contiguous(), sequences.boundaries, sequences.boundaries, sequences.longest,
            sequences.longest, 0.0, True, _no_dropout(q), _no_dropout(q), scale=scaling,
        )  # fmt: skip
        return grads
    columns = torch.split(lse, [*sequences.lengths], 1)
    parts = zip(*(torch.split(t, [*sequences.lengths]) for t in (d_out, q, k, v, out)), columns, strict=True)
    each = [one_backward(*part, causal=True, scaling=scaling) for part in parts]
    d_q, d_k, d_v = (torch.cat(grads) for grads in zip(*each, strict=True))
    return d_q, d_k, d_v


def _heads_first(tokens: Tensor) -> Tensor:
    """[N, heads, D] -> [1, heads, N, D], a view."""
    return tokens.transpose(0, 1)[None]


def _no_dropout(like: Tensor) -> Tensor:
    """In place of the state of a random generator, which only dropout looks at."""
    return torch.zeros(2, dtype=torch.uint64, device=like.device)


def _checked(lse: Tensor, q: Tensor) -> Tensor:
    """Raises EngineError if this torch lays log-sum-exp out differently: gradients would be silently wrong."""
    if lse.shape != (q.shape[1], q.shape[0]):
        raise EngineError(
            "torch's flash attention gives log-sum-exp in another layout",
            got=f"{tuple(lse.shape)} in torch {torch.__version__}",
            needed=f"{(q.shape[1], q.shape[0])}",
            do="Use a version of torch that Rollplex allows.",
        )
    return lse
