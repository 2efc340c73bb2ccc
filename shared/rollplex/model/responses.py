"""Responses between their bytes on the wire and padded tensors.

Owns the byte formats of `Responses` and `Logprobs`. Knows nothing of prompts or models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollplex.errors import ProtocolError
from rollplex.protocol.common import Logprobs, Responses


def response_batch(responses: Sequence[Responses]) -> tuple[Tensor, Tensor]:
    """All samples of some groups, one row each, in order.

    Returns:
        tokens: int64 [rows, R], right-padded with 0 to the longest. lengths: int64 [rows].

    Raises:
        ProtocolError: a group's bytes do not hold as many tokens as its lengths say, or a response is empty.
    """
    lengths = [length for group in responses for length in group.lengths]
    if not lengths or min(lengths) < 1:
        raise ProtocolError("a response has no tokens", got=f"lengths {lengths[:16]}", needed="at least 1 each")
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    row = 0
    for group in responses:
        flat = _flat(group.tokens, torch.int32, sum(group.lengths), f"tokens of group {group.group}")
        for part in torch.split(flat, list(group.lengths)):
            tokens[row, : len(part)] = part
            row += 1
    return tokens, torch.tensor(lengths)


def split_values(values: Tensor, responses: Sequence[Responses]) -> tuple[Logprobs, ...]:
    """Per-token numbers [rows, R] as messages, one per group: float64, padding left out."""
    out = []
    row = 0
    wide = values.detach().to("cpu", torch.float64)
    for group in responses:
        parts = [wide[row + i, :length] for i, length in enumerate(group.lengths)]
        row += len(parts)
        out.append(Logprobs(group=group.group, values=torch.cat(parts).numpy().tobytes()))
    return tuple(out)


def join_values(logprobs: Sequence[Logprobs], responses: Sequence[Responses]) -> Tensor:
    """The inverse of `split_values`: float64 [rows, R], 0 at padding.

    Raises:
        ProtocolError: not the groups of `responses`, or not as many numbers as tokens.
    """
    if [item.group for item in logprobs] != [group.group for group in responses]:
        raise ProtocolError(
            "log-probabilities are of other groups",
            got=str([item.group for item in logprobs]),
            needed=str([group.group for group in responses]),
        )
    lengths = [length for group in responses for length in group.lengths]
    values = torch.zeros(len(lengths), max(lengths), dtype=torch.float64)
    row = 0
    for item, group in zip(logprobs, responses, strict=True):
        flat = _flat(item.values, torch.float64, sum(group.lengths), f"log-probabilities of group {item.group}")
        for part in torch.split(flat, list(group.lengths)):
            values[row, : len(part)] = part
            row += 1
    return values


def _flat(blob: bytes, dtype: torch.dtype, count: int, what: str) -> Tensor:
    if len(blob) != count * dtype.itemsize:
        raise ProtocolError(f"{what} have the wrong size", got=f"{len(blob)} bytes", needed=f"{count * dtype.itemsize}")
    return torch.frombuffer(bytearray(blob), dtype=dtype)
