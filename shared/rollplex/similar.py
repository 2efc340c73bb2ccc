"""Which of the known names a misspelt one means. Pure; imports little, as the process of the reward functions does."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(word: str, options: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The option that `word` most likely means, or None if none is close.

    Of those that difflib holds for close, the one with the fewest edits; with as many, difflib's favourite.

    Args:
        word: as it was written.
        options: what it could have been.
        cutoff: difflib's similarity, 0 to 1, that an option must reach.
    """
    close = difflib.get_close_matches(word, list(options), n=5, cutoff=cutoff)
    return min(close, key=lambda option: edits(word, option), default=None)


def edits(left: str, right: str) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours from one text to the other.

    The optimal string alignment distance: Damerau's, without editing what was swapped.
    """
    before: list[int] = []
    last = list(range(len(right) + 1))
    for row, a in enumerate(left, 1):
        now = [row]
        for column, b in enumerate(right, 1):
            cost = min(last[column] + 1, now[-1] + 1, last[column - 1] + (a != b))
            if row > 1 and column > 1 and a == right[column - 2] and b == left[row - 2]:
                cost = min(cost, before[column - 2] + 1)
            now.append(cost)
        before, last = last, now
    return last[-1]
