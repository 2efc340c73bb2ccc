"""Reward failures as the user reads them."""

from __future__ import annotations

import pytest

from rollplex.protocol.reward import RewardFailed, RewardProblem
from rollplex_coordinator.steps.problems import PROBLEMS, reward_error


def _failed(problem: RewardProblem, detail: str, place: str = "") -> RewardFailed:
    return RewardFailed(cause=1, step=2, group=5, row=2, place=place, function="right", problem=problem, detail=detail)


def test_the_sentence_comes_first_and_the_traceback_last() -> None:
    detail = "KeyError: 'x'\n  File \"my.py\", line 3, in right\n    return row['x']"
    text = str(reward_error(_failed(RewardProblem.RAISED, detail, "rows.jsonl:3 (row 2)"), "step 2"))
    assert text.startswith(
        "step 2, group 5, rows.jsonl:3 (row 2): reward function right raised; got KeyError: 'x'; needed one finite"
    )
    assert text.endswith("leave such groups out.\n  File \"my.py\", line 3, in right\n    return row['x']")


@pytest.mark.parametrize("problem", list(RewardProblem))
def test_a_failure_without_place_or_traceback_names_the_row_by_its_number(problem: RewardProblem) -> None:
    text = str(reward_error(_failed(problem, "1 reward for 8 completions"), "step 2"))
    assert text.startswith(
        f"step 2, group 5, row 2: reward function right {PROBLEMS[problem]}; got 1 reward for 8 completions; needed"
    )
    assert text.endswith("leave such groups out.")
