"""A reward for boxes in an image: how well what the text says covers the right ones. Pure.

A box is x1, y1, x2, y2: left, top, right, bottom, in the same units as in the dataset. Nothing is scaled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from rollplex.rewards.ready.texts import Columns, Completion, answer_in, keeps, right_answer, text_of

Box: TypeAlias = tuple[float, float, float, float]
MAX_BOXES = 100
"""Of one completion; the first so many count."""
_NUMBER = r"\s*(-?\d{1,9}(?:\.\d{1,9})?)\s*"
_BOX = re.compile(
    rf"\[{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}\]|\({_NUMBER},{_NUMBER}\)\s*,?\s*\({_NUMBER},{_NUMBER}\)", re.ASCII
)


@keeps("column", "match", "threshold")
def iou(
    completions: Sequence[Completion],
    *,
    column: str = "",
    match: Literal["best", "mean"] = "best",
    threshold: float = 0.0,
    **columns: Columns,
) -> list[float]:
    """Intersection over union of the boxes in the text with the right ones, from 0 to 1; 0 without a box.

    Boxes are read as [x1, y1, x2, y2], in JSON too, and as (x1, y1), (x2, y2). The row has a box, a list of boxes, an
    object with "bbox", "bbox_2d" or "box", or a text with boxes.

    Args:
        match: best: the greatest value among all pairs of a box in the text and a right one. mean: boxes are paired
            one to one, greatest value first, and the sum is divided by the greater of the two counts, so that boxes
            that are missing and boxes too many both cost.
        threshold: above 0: a pair counts as 1 from this value on, and as 0 below.

    Raises:
        ValueError, RewardError: the row has no right box, or an option cannot be used.
    """
    if match not in {"best", "mean"} or not 0.0 <= threshold <= 1.0:
        raise ValueError(f"match is best or mean, threshold from 0 to 1; got {match!r} and {threshold!r}")
    right = right_answer(columns, column)
    wanted = boxes_of(right)
    if not wanted:
        raise ValueError(f"the right answer of this row is no box: {str(right)[:200]!r}")
    return [_score(boxes_in(answer_in(text_of(c))), wanted, match, threshold) for c in completions]


def boxes_in(text: str) -> list[Box]:
    """The boxes that a text names, at most `MAX_BOXES`."""
    found: list[Box] = []
    for place in _BOX.finditer(text):
        x1, y1, x2, y2 = (float(number) for number in place.groups() if number is not None)
        found.append((x1, y1, x2, y2))
        if len(found) == MAX_BOXES:
            break
    return found


def boxes_of(value: object) -> list[Box]:
    """The boxes that a column holds; none if it is anything else."""
    match value:
        case str():
            return boxes_in(value)
        case [int() | float() as x1, int() | float() as y1, int() | float() as x2, int() | float() as y2]:
            return [(float(x1), float(y1), float(x2), float(y2))]
        case list():
            return [box for item in value for box in boxes_of(item)]
        case Mapping():
            return next((boxes_of(value[name]) for name in ("bbox", "bbox_2d", "box") if name in value), [])
        case _:
            return []


def overlap(one: Box, other: Box) -> float:
    """Intersection over union; 0 if a box has no area, as one with right and left exchanged."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    areas = [max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1]) for box in (one, other)]
    if width <= 0.0 or height <= 0.0 or not all(areas):
        return 0.0
    inside = width * height
    return inside / (sum(areas) - inside)


def _score(found: Sequence[Box], wanted: Sequence[Box], match: str, threshold: float) -> float:
    pairs = [(overlap(box, right), i, j) for i, box in enumerate(found) for j, right in enumerate(wanted)]
    pairs.sort(key=lambda pair: (-pair[0], pair[1], pair[2]))
    if match == "best":
        return _counted(pairs[0][0], threshold) if pairs else 0.0
    total, used_found, used_wanted = 0.0, set[int](), set[int]()
    for value, i, j in pairs:
        if i not in used_found and j not in used_wanted:
            used_found.add(i)
            used_wanted.add(j)
            total += _counted(value, threshold)
    return total / max(len(found), len(wanted))


def _counted(value: float, threshold: float) -> float:
    return float(value >= threshold) if threshold > 0.0 else value
