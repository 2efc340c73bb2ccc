from __future__ import annotations

import pytest

from rollplex.similar import closest, edits


@pytest.mark.parametrize(
    ("left", "right", "count"),
    [("", "", 0), ("ab", "", 2), ("", "ab", 2), ("gpro", "grpo", 1), ("gpro", "gspo", 2), ("ca", "abc", 3)],
)
def test_swapped_neighbours_are_one_edit(left: str, right: str, count: int) -> None:
    assert edits(left, right) == edits(right, left) == count


def test_fewest_edits_win_and_what_is_far_is_not_suggested() -> None:
    assert closest("gpro", ["gspo", "grpo", "dapo"]) == "grpo"
    assert closest("zzzz", ["gspo", "grpo", "dapo"]) is None
    assert closest("grpo", []) is None
