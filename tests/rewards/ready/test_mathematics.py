"""A ready-made reward for mathematics."""

from __future__ import annotations

import pytest

from rollplex.rewards import ready

HALF = r"\frac{1}{2}"
ENDLESS = ("9^{9^{9^{9}}}", "9^9^9^9", "9**9**9**9", "9^{1+9^{9}}", "9^{999999999}", "99999999!")


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("The answer is 0.5", 1.0),
        (r"\boxed{1/2}", 1.0),
        (r"so $\frac{2}{4}$", 1.0),
        ("<think>1</think><answer>0.5</answer>", 1.0),
        (rf"<answer>{HALF}</answer>", 1.0),
        ("<answer>$0.5$</answer>", 1.0),
        ("<answer>x</answer>", 0.0),
        ("<answer>2</answer>", 0.0),
        ("no idea", 0.0),
        ("", 0.0),
    ],
)
def test_answers_are_compared_by_what_they_mean(text: str, reward: float) -> None:
    assert ready.math([text], answer=[HALF]) == [reward]
    assert ready.math([text], answer=[f"${HALF}$"]) == [reward]


def test_a_right_answer_may_be_a_formula_or_a_number() -> None:
    assert ready.math([r"\boxed{1+x^2}", "$x^2+1$", r"\boxed{x^2}"], answer=["x^2+1"] * 3) == [1.0, 1.0, 0.0]
    assert ready.math(["42.0"], answer=[42]) == [1.0]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text", ["9^{9^{9^{9}}}", "9^9^9^9", "9**9**9**9", "9^{1+9^{9}}", "9^{999999999}", "99999999!"]
)
def test_what_would_be_computed_for_ever_is_compared_as_a_text(text: str) -> None:
    boxed = f"\\boxed{{{text}}}"
    assert ready.math([boxed, "3"], answer=["3"] * 2) == [0.0, 1.0]
    assert ready.math([boxed, "3"], answer=[text] * 2) == [1.0, 0.0]


@pytest.mark.parametrize("text", ["x^2+y^2", "e^{x^2}", "2^{10}", "2^2\\cdot 3^2", "5!"])
def test_what_is_usual_is_computed(text: str) -> None:
    assert ready.math([f"\\boxed{{{text} + 0}}"], answer=[text]) == [1.0]


def test_a_right_answer_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ValueError, match="no mathematics that can be read: '$$'".replace("$", r"\$")):
        ready.math(["1"], answer=["$$"])
