"""The digest's lanes (`rollplex.memory.digest`) by torch: for memory of a GPU.

Owns: the same arithmetic in signed numbers, which wrap alike. A shift by half a word is done on the halves.
"""

from __future__ import annotations

import sys
from typing import Final

import torch
from torch import Tensor

from rollplex.memory.digest import GOLDEN, MIX, WORD_BYTES, first_key
from rollplex.memory.segment import Mapping
from rollplex.memory.tensors import tensor

_CHUNK_WORDS: Final = 2**21
"""Three arrays of 16 MiB: the scratch, and about what an H200 keeps in its cache."""
_MASK: Final = 2**64 - 1


def mapping_lanes(mapping: Mapping, offset: int, size_bytes: int) -> tuple[int, int]:
    """Both lanes of `size_bytes` of a mapping from `offset` on, a multiple of 8.

    Everything given to torch's current stream before is in it; this waits for the result.
    """
    return lanes(tensor(mapping, offset, (size_bytes,), torch.uint8))


def lanes(content: Tensor, chunk_words: int = _CHUNK_WORDS) -> tuple[int, int]:
    """Both lanes of bytes (uint8, one dimension, contiguous, 8-byte aligned). Scratch: 24 bytes per word of a chunk."""
    assert sys.byteorder == "little", "words are read as they lie"
    whole = content.numel() // WORD_BYTES
    words = content[: whole * WORD_BYTES].view(torch.int64)
    keys = torch.arange(min(chunk_words, max(whole, 1)), dtype=torch.int64, device=content.device)
    keys.mul_(_signed(2 * GOLDEN)).add_(_signed(first_key(0)))
    mixed = torch.empty_like(keys)
    sums = torch.zeros(2, dtype=torch.int64, device=content.device)
    for start in range(0, whole, chunk_words):
        _add(sums, words[start : start + chunk_words], keys, mixed)
        keys.add_(_signed(2 * GOLDEN * chunk_words))
    if content.numel() % WORD_BYTES:
        last = content.new_zeros(WORD_BYTES)
        last[: content.numel() % WORD_BYTES] = content[whole * WORD_BYTES :]
        _add(sums, last.view(torch.int64), keys.new_tensor([_signed(first_key(whole))]), mixed)
    first, second = sums.tolist()
    return first & _MASK, second & _MASK


def _add(sums: Tensor, words: Tensor, keys: Tensor, mixed: Tensor) -> None:
    keys, mixed = keys[: words.numel()], mixed[: words.numel()]
    torch.add(words, keys, out=mixed)
    halves = mixed.view(torch.int32).view(-1, 2)
    low, high = halves[:, 0], halves[:, 1]
    for _ in range(2):
        low.bitwise_xor_(high)
        mixed.mul_(_signed(MIX))
    low.bitwise_xor_(high)
    sums[0] += mixed.sum()
    sums[1] += mixed.mul_(keys).sum()


def _signed(value: int) -> int:
    """The number of 64 bits as torch wants it."""
    value &= _MASK
    return value - 2**64 if value >> 63 else value
