"""How long the responses of a bench are: one length, a spread, or a long tail; the same each time. Pure."""

from __future__ import annotations

import math
import re
from statistics import NormalDist, fmean
from typing import Final

from msgspec import Struct

from rollplex.data.order import permutation
from rollplex.errors import ConfigError

_TEXT = re.compile(r"([0-9]{1,7})(?::([0-9]{1,7}))?", re.ASCII)
_TAIL = re.compile(r"tail:([0-9]{1,7}):([0-9]{1,7})", re.ASCII)
SIGMA: Final = 1.0
"""Standard deviation of the logarithms of a long tail: half of the responses are shorter than 0.6 of the mean, one in
ten is longer than 2.2 of it."""
_HALVINGS = 60


class Lengths(Struct, frozen=True, kw_only=True):
    """Response lengths in tokens, from `shortest` to `longest`, both at least 1."""

    shortest: int
    longest: int
    mean: int = 0
    """Of a long tail: lognormal lengths, cut off at `longest`, with this mean. 0: evenly spaced lengths."""

    @property
    def text(self) -> str:
        """As it is written."""
        if self.mean:
            return f"tail:{self.mean}:{self.longest}"
        return str(self.longest) if self.shortest == self.longest else f"{self.shortest}:{self.longest}"

    def of(self, num_samples: int) -> tuple[int, ...]:
        """From the shortest to the longest, in an order that is drawn once and for all.

        Args:
            num_samples: responses of one iteration.
        """
        if self.shortest == self.longest:
            return (self.longest,)
        found = self._tail(num_samples) if self.mean else self._spaced(num_samples)
        return tuple(found[index] for index in permutation(num_samples, 0, 0).tolist())

    def _spaced(self, num_samples: int) -> list[int]:
        last = max(num_samples - 1, 1)
        return [
            self.shortest + (2 * index * (self.longest - self.shortest) + last) // (2 * last)
            for index in range(num_samples)
        ]

    def _tail(self, num_samples: int) -> list[int]:
        """Quantiles of the distribution, in the middle of so many equal parts."""
        normal = NormalDist(sigma=SIGMA)
        factors = [math.exp(normal.inv_cdf((index + 0.5) / num_samples)) for index in range(num_samples)]

        def cut(scale: float) -> list[int]:
            return [min(self.longest, max(self.shortest, round(scale * factor))) for factor in factors]

        low, high = 0.0, self.longest / factors[0]  # of the scale: all shortest, all longest
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if fmean(cut(middle)) < self.mean else (low, middle)
        return cut(high)


def parse_lengths(text: str) -> Lengths:
    """`32`, `16:48` for a spread, or `tail:512:2048` for a long tail of mean 512, cut off at 2048.

    Raises:
        ConfigError: none of these, or the second number is below the first.
    """
    tail = _TAIL.fullmatch(text.strip())
    match = tail or _TEXT.fullmatch(text.strip())
    low = int(match[1]) if match else 0
    high = int(match[2] or match[1]) if match else 0
    if not (1 < low < high if tail else 1 <= low <= high):
        raise ConfigError(
            "The length of the responses cannot be used",
            got=repr(text),
            needed="a number of tokens such as 32, the shortest and the longest such as 16:48, or the mean and the "
            "longest of a long tail such as tail:512:2048",
            where="--response",
        )
    return Lengths(shortest=1, longest=high, mean=low) if tail else Lengths(shortest=low, longest=high)
