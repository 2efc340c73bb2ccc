"""The answer in a text, and the right answer of a row."""

from __future__ import annotations

from typing import Any

import pytest

from rollplex.errors import RewardError
from rollplex.rewards.arguments import Arguments
from rollplex.rewards.ready.texts import answer_in, keeps, right_answer, text_of


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 7 ", "7"),
        ("<think>8</think>\n<answer> 7\n</answer>", "7"),
        ("<answer>8</answer> no, <answer>7</answer>", "7"),
        ("<answer>7", "<answer>7"),
        (r"so \boxed{8} or \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"<answer>7</answer> \boxed{8}", "7"),
        (r"\boxed{8", r"\boxed{8"),
        ("", ""),
    ],
)
def test_the_answer_is_in_the_last_tag_or_the_last_box_or_all_of_the_text(text: str, answer: str) -> None:
    assert answer_in(text) == answer


def test_a_completion_is_a_text_or_messages() -> None:
    assert text_of("7") == text_of([{"role": "assistant", "content": "7"}]) == "7"


def test_the_right_answer_is_looked_for_in_the_usual_columns_or_the_one_that_is_named() -> None:
    columns: dict[str, Any] = {"solution": ["s"] * 2, "answer": ["a"] * 2, "label": [0] * 2, "step": 3}
    assert right_answer(columns, "") == "a"
    assert right_answer(columns, "label") == 0
    assert right_answer({**columns, "ground_truth": ["g"]}, "") == "g"
    assert right_answer({**columns, "reward_model": [{"ground_truth": "r"}]}, "") == "r"


def test_a_row_without_a_right_answer_is_an_error() -> None:
    with pytest.raises(ValueError, match="no column 'label'; it has answer"):
        right_answer({"answer": ["a"], "step": 3}, "label")
    with pytest.raises(ValueError, match="is empty: ''"):
        right_answer({"answer": [""]}, "")
    with pytest.raises(RewardError, match="no right answer"):
        right_answer({"label": [0]}, "")


def test_an_argument_that_is_kept_for_options_gets_no_column() -> None:
    @keeps("threshold")
    def f(completions: Any, threshold: float = 0.5, **columns: Any) -> None: ...

    given: dict[str, object] = {"completions": [1], "threshold": [2], "answer": [3]}
    assert Arguments(f).pick(given) == {"completions": [1], "answer": [3]}
    assert Arguments(f, {"threshold": 0.1}).pick(given) == {"completions": [1], "answer": [3]}
    with pytest.raises(RewardError, match="no argument 'answer'"):
        Arguments(f, {"answer": 0.1})
