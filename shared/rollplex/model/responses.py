"""Responses between their bytes on the wire and padded tensors.

Owns the byte formats of `Responses` and `Logprobs`. Knows nothing of prompts or models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollplex.errors import ProtocolError
from rollplex.model.device import HOST
from rollplex.protocol.common import Logprobs, Responses


def response_batch(responses: Sequence[Responses], *, device: torch.device = HOST) -> tuple[Tensor, Tensor]:
    """All samples of some groups, one row each, in order, on `device`.

    Returns:
        tokens: int64 [rows, R], right-padded with 0 to the longest. lengths: int64 [rows].

    Raises:
        ProtocolError: a group's bytes do not hold as many tokens as its lengths say, or a response is empty.
    """
    lengths = _lengths(responses)
    if not len(lengths) or int(lengths.min()) < 1:
        raise ProtocolError(
            "a response has no tokens", got=f"lengths {lengths[:16].tolist()}", needed="at least 1 each"
        )
    flat = [_flat(g.tokens, torch.int32, sum(g.lengths), f"tokens of group {g.group}") for g in responses]
    return _padded(torch.cat(flat).to(torch.int64), lengths).to(device), lengths.to(device)


def split_values(values: Tensor, responses: Sequence[Responses]) -> tuple[Logprobs, ...]:
    """Per-token numbers [rows, R] as messages, one per group: float64, padding left out."""
    lengths = _lengths(responses)
    flat = values.detach().to(HOST, torch.float64)[_real(lengths, values.shape[1])]
    per_group = torch.split(flat, [sum(group.lengths) for group in responses])
    return tuple(
        Logprobs(group=group.group, values=part.numpy().tobytes())
        for group, part in zip(responses, per_group, strict=True)
    )


def join_values(logprobs: Sequence[Logprobs], responses: Sequence[Responses], *, device: torch.device = HOST) -> Tensor:
    """The inverse of `split_values`: float64 [rows, R] on `device`, 0 at padding.

    Raises:
        ProtocolError: not the groups of `responses`, or not as many numbers as tokens.
    """
    if [item.group for item in logprobs] != [group.group for group in responses]:
        raise ProtocolError(
            "log-probabilities are of other groups",
            got=str([item.group for item in logprobs]),
            needed=str([group.group for group in responses]),
        )
    flat = [
        _flat(item.values, torch.float64, sum(group.lengths), f"log-probabilities of group {item.group}")
        for item, group in zip(logprobs, responses, strict=True)
    ]
    return _padded(torch.cat(flat), _lengths(responses)).to(device)


def _lengths(responses: Sequence[Responses]) -> Tensor:
    """int64 [rows]: of all samples of all groups, in order."""
    lengths = [length for group in responses for length in group.lengths]
    return torch.tensor(lengths, dtype=torch.int64, device=HOST)


def _real(lengths: Tensor, longest: int) -> Tensor:
    """bool [rows, longest]: True where a row has a token."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


def _padded(flat: Tensor, lengths: Tensor) -> Tensor:
    """Rows one after the other as [rows, longest], 0 at padding."""
    longest = int(lengths.max())
    out = torch.zeros(len(lengths), longest, dtype=flat.dtype, device=HOST)
    out[_real(lengths, longest)] = flat
    return out


def _flat(blob: bytes, dtype: torch.dtype, count: int, what: str) -> Tensor:
    if len(blob) != count * dtype.itemsize:
        raise ProtocolError(f"{what} have the wrong size", got=f"{len(blob)} bytes", needed=f"{count * dtype.itemsize}")
    return torch.frombuffer(bytearray(blob), dtype=dtype)
