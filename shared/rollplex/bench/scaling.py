"""Rows with fewer prompts than the others: what they would have taken with as many. Pure.

Replicated prefixes take so long that a bench may measure them with a part of the prompts. SCORE and TRAIN are then
multiplied, for they do one prompt after the other; all else stays as measured, although a rollout of more responses
takes longer: so the figure is a lower bound, and a gain over it too.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from rollplex.bench.rows import Row
from rollplex.data.order import permutation

SCALED = ("score", "train", "prefix_backward", "score_units", "suffix_units")


def at_prompts(row: Row, prompts: int) -> Row:
    """The row as if its iterations had so many prompts."""
    if row.prompts in (0, prompts):
        return row
    factor = prompts / row.prompts
    seconds = {name: value * factor if name in SCALED else value for name, value in row.median_s.items()}
    more = sum(seconds[name] - row.median_s[name] for name in ("score", "train"))
    seconds["iteration"] += more
    return replace(row, median_s=seconds, iteration_s=tuple(one + more for one in row.iteration_s))


def thinned(lengths: Sequence[int], num_samples: int) -> tuple[int, ...]:
    """So many of the lengths, spread evenly over them in order of size: about the same mean and tail."""
    if num_samples >= len(lengths):
        return tuple(lengths)
    ordered = sorted(lengths)
    kept = [ordered[(2 * index + 1) * len(ordered) // (2 * num_samples)] for index in range(num_samples)]
    return tuple(kept[index] for index in permutation(num_samples, 0, 0).tolist())
