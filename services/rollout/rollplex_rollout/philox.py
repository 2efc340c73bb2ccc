"""Counter-based random numbers: Philox4x32-10, vectorised over rows.

Owns the map from (seed, purpose, step, prompt, sample, position) to a number in [0, 1). Knows no tensor library, no
model and no sampling rule, and keeps no state that could be lost or saved: the same key always gives the same number.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), and the known-answer
vectors of their Random123 library.

    key      64 bits   blake2b-64 of (seed, step, purpose)        once per unit
    counter  words 0-1 prompt (the dataset row), low word first   64 bits
             word  2   sample within the group                    32 bits
             word  3   position within the response               32 bits
    result   words 0-1 of the block, its 53 high bits / 2**53; words 2-3 are not used
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from rollplex.errors import EngineError

ROUNDS = 10
BLOCK_POSITIONS = 32
"""Positions computed at a time; a matter of speed, no number depends on it."""

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_BUMPS = (0x9E3779B9, 0xBB67AE85)

Words = NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 of many counters under one key.

    Args:
        counter: four arrays of equal shape, uint64, each value below 2**32.
        key: two words below 2**32.

    Returns:
        Four arrays of that shape, uint64, each value below 2**32.
    """
    first, second, third, fourth = counter
    for round_index in range(ROUNDS):
        left = np.uint64((key[0] + round_index * _BUMPS[0]) & 0xFFFFFFFF)
        right = np.uint64((key[1] + round_index * _BUMPS[1]) & 0xFFFFFFFF)
        product, other = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, second, third, fourth = (
            (other >> _HALF) ^ second ^ left,
            other & _LOW,
            (product >> _HALF) ^ fourth ^ right,
            product & _LOW,
        )
    return first, second, third, fourth


def draw_key(*, seed: int, purpose: str, step: int) -> tuple[int, int]:
    """The Philox key of all draws of one step for one purpose: blake2b-64 of the three, as two little-endian words.

    Two different triples share a key with probability 2**-64.
    """
    text = b"rollplex draw\0" + seed.to_bytes(8, "little") + step.to_bytes(8, "little") + purpose.encode()
    digest = blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


class Draws:
    """The uniform numbers of one unit's rows.

    Args:
        seed, purpose, step: as `draw_key`.
        prompts: dataset row of each decode row, length `rows`, below 2**63.
        samples: sample index within the group of each decode row, length `rows`, below 2**32.

    Raises:
        EngineError: the two differ in length, or a value is out of range.
    """

    def __init__(self, *, seed: int, purpose: str, step: int, prompts: Sequence[int], samples: Sequence[int]) -> None:
        if len(prompts) != len(samples):
            raise EngineError("Rows and samples differ in number", got=f"{len(prompts)} and {len(samples)}")
        self._key = draw_key(seed=seed, purpose=purpose, step=step)
        rows = _unsigned(prompts, bits=63, name="prompt")
        self._samples = _unsigned(samples, bits=32, name="sample")
        self._low, self._high = rows & _LOW, rows >> _HALF
        self._block_start = -1
        self._block: NDArray[np.float64] = np.empty((0, 0))

    def at(self, position: int) -> NDArray[np.float64]:
        """The numbers at this position of the response: float64 [rows] in [0, 1), multiples of 2**-53.

        Raises:
            EngineError: the position is negative or does not fit 32 bits.
        """
        if not 0 <= position < 2**32:
            raise EngineError("A position of a response is out of range", got=str(position), needed="0 .. 2**32 - 1")
        start = position - position % BLOCK_POSITIONS
        if start != self._block_start:
            self._block, self._block_start = self._compute(start), start
        row: NDArray[np.float64] = self._block[position - start]
        return row

    def _compute(self, start: int) -> NDArray[np.float64]:
        shape = (BLOCK_POSITIONS, len(self._samples))
        positions = np.arange(start, start + BLOCK_POSITIONS, dtype=np.uint64)[:, None]
        counter = (
            np.broadcast_to(self._low, shape),
            np.broadcast_to(self._high, shape),
            np.broadcast_to(self._samples, shape),
            np.broadcast_to(positions, shape),
        )
        first, second, _, _ = philox4x32(counter, self._key)
        return unit_interval(first, second)


def unit_interval(high: Words, low: Words) -> NDArray[np.float64]:
    """The 53 high bits of the 64 as a fraction: float64 in [0, 1 - 2**-53], exact."""
    bits = ((high << _HALF) | low) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _unsigned(values: Sequence[int], *, bits: int, name: str) -> Words:
    if values and not 0 <= min(values) <= max(values) < 2**bits:
        raise EngineError(
            f"A {name} index is out of range", got=f"{min(values)} .. {max(values)}", needed=f"0 .. 2**{bits} - 1"
        )
    return np.asarray(values, dtype=np.uint64)
