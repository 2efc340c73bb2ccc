"""How long the responses of a bench are: one length, or a spread that is the same each time. Pure."""

from __future__ import annotations

import re

from msgspec import Struct

from rollplex.data.order import permutation
from rollplex.errors import ConfigError

_TEXT = re.compile(r"([0-9]{1,7})(?::([0-9]{1,7}))?", re.ASCII)


class Lengths(Struct, frozen=True, kw_only=True):
    """Response lengths in tokens, from `shortest` to `longest`, both at least 1."""

    shortest: int
    longest: int

    @property
    def text(self) -> str:
        """As it is written."""
        return str(self.longest) if self.shortest == self.longest else f"{self.shortest}:{self.longest}"

    def of(self, num_samples: int) -> tuple[int, ...]:
        """Evenly spaced from the shortest to the longest, in an order that is drawn once and for all.

        Args:
            num_samples: responses of one iteration.
        """
        if self.shortest == self.longest:
            return (self.longest,)
        last = max(num_samples - 1, 1)
        spaced = [
            self.shortest + (2 * index * (self.longest - self.shortest) + last) // (2 * last)
            for index in range(num_samples)
        ]
        return tuple(spaced[index] for index in permutation(num_samples, 0, 0).tolist())


def parse_lengths(text: str) -> Lengths:
    """`32`, or `16:48` for a spread.

    Raises:
        ConfigError: neither, or the second is below the first.
    """
    match = _TEXT.fullmatch(text.strip())
    low = int(match[1]) if match else 0
    high = int(match[2] or match[1]) if match else 0
    if not 1 <= low <= high:
        raise ConfigError(
            "The length of the responses cannot be used",
            got=repr(text),
            needed="a number of tokens such as 32, or the shortest and the longest such as 16:48",
            where="--response",
        )
    return Lengths(shortest=low, longest=high)
