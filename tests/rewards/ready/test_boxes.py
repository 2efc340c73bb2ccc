"""A ready-made reward for boxes."""

from __future__ import annotations

from typing import Any

import pytest

from rollplex.errors import RewardError
from rollplex.rewards.ready import iou
from rollplex.rewards.ready.boxes import MAX_BOXES, boxes_in, boxes_of, overlap

ONE = [0, 0, 10, 10]
HALF = "[0, 0, 10, 5]"


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        ("[1, 2, 3, 4]", [(1, 2, 3, 4)]),
        (
            '```json\n[{"bbox_2d": [1.5,-2,3,4], "label": "dog"}, {"bbox_2d": [5,6,7,8]}]\n```',
            [(1.5, -2, 3, 4), (5, 6, 7, 8)],
        ),
        ("dog (1,2),(3,4) and (5, 6) (7, 8)", [(1, 2, 3, 4), (5, 6, 7, 8)]),
        ("[1, 2, 3]", []),
        ("[1, 2, 3, 4, 5]", []),
        ("[nan, 2, 3, 4]", []),
        ("", []),
    ],
)
def test_boxes_are_read_in_two_ways(text: str, boxes: Any) -> None:
    assert boxes_in(text) == boxes


def test_only_so_many_boxes_count() -> None:
    assert len(boxes_in("[1, 2, 3, 4]" * 500)) == MAX_BOXES


@pytest.mark.parametrize(
    ("value", "boxes"),
    [
        (ONE, [(0, 0, 10, 10)]),
        ([ONE, [1.5, 2, 3, 4]], [(0, 0, 10, 10), (1.5, 2, 3, 4)]),
        ({"bbox_2d": ONE, "label": "dog"}, [(0, 0, 10, 10)]),
        ([{"bbox": ONE}, {"box": [1, 2, 3, 4]}], [(0, 0, 10, 10), (1, 2, 3, 4)]),
        ("<answer>[0, 0, 10, 10]</answer>", [(0, 0, 10, 10)]),
        ({"label": "dog"}, []),
        (7, []),
        ([], []),
    ],
)
def test_a_column_may_hold_boxes_in_many_ways(value: object, boxes: Any) -> None:
    assert boxes_of(value) == boxes


@pytest.mark.parametrize(
    ("other", "value"),
    [
        ((0, 0, 10, 10), 1.0),
        ((0, 0, 10, 5), 0.5),
        ((5, 5, 15, 15), 25 / 175),
        ((10, 0, 20, 10), 0.0),
        ((20, 20, 30, 30), 0.0),
        ((10, 10, 0, 0), 0.0),
        ((3, 3, 3, 8), 0.0),
    ],
)
def test_overlap_is_intersection_over_union(other: Any, value: float) -> None:
    assert overlap((0, 0, 10, 10), other) == overlap(other, (0, 0, 10, 10)) == pytest.approx(value)


def test_the_best_pair_counts_or_all_pairs() -> None:
    texts = [HALF, f"{HALF} [0, 0, 10, 10]", "[50, 50, 60, 60]", "no box", "<answer>[0,0,10,10]</answer>"]
    assert iou(texts, answer=[ONE] * 5) == [0.5, 1.0, 0.0, 0.0, 1.0]
    assert iou(texts, answer=[ONE] * 5, match="mean") == [0.5, 0.5, 0.0, 0.0, 1.0]
    two = [ONE, [20, 20, 30, 30]]
    assert iou(["[20, 20, 30, 25] [0, 0, 10, 10]", HALF, ""], answer=[two] * 3, match="mean") == [0.75, 0.25, 0.0]
    # one to one: the same box in the text does not count for both
    assert iou(["[0, 0, 10, 10]"], answer=[[ONE, ONE]], match="mean") == [0.5]


def test_with_a_threshold_a_pair_counts_or_does_not() -> None:
    texts = [HALF, "[0, 0, 10, 4]", "[0, 0, 10, 10]", ""]
    assert iou(texts, answer=[ONE] * 4, threshold=0.5) == [1.0, 0.0, 1.0, 0.0]
    assert iou([f"{HALF} [0, 9, 10, 10]"], answer=[ONE], threshold=0.5, match="mean") == [0.5]


def test_what_cannot_be_used_is_an_error_and_not_a_0() -> None:
    with pytest.raises(ValueError, match="no box: 'dog'"):
        iou([HALF], answer=["dog"])
    with pytest.raises(RewardError, match="no right answer"):
        iou([HALF], label=["dog"])
    wrong: list[dict[str, Any]] = [{"match": "worst"}, {"threshold": 2.0}]
    for options in wrong:
        with pytest.raises(ValueError, match="best or mean"):
            iou([HALF], answer=[ONE], **options)
