"""Means of what reward functions report, for metrics.jsonl and evaluations. Pure.

Numbers come in the order in which answers arrived, or in which groups are numbered; the means do not depend on it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence

from rollplex.protocol.reward import RewardPart


def finite(blob: bytes) -> list[float]:
    """The numbers of a float64 blob that are there: NaN is an abstention."""
    return [value for (value,) in struct.iter_unpack("<d", blob) if math.isfinite(value)]


def mean(values: Sequence[float]) -> float:
    """NaN without values. The sum is exact before it is rounded, so the order of the values does not matter."""
    return math.fsum(values) / len(values) if values else math.nan


def part_means(names: Sequence[str], parts: Iterable[RewardPart]) -> dict[str, float]:
    """rewards/<function>/<part>/mean over all samples that have the part.

    Args:
        names: of the functions, in their order.
        parts: of any number of groups.
    """
    values: dict[tuple[int, str], list[float]] = {}
    for part in parts:
        values.setdefault((part.function, part.name), []).extend(finite(part.values))
    return {f"rewards/{names[index]}/{name}/mean": mean(found) for (index, name), found in sorted(values.items())}
