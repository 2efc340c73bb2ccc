"""Ready-made rewards for words, letters and forms."""

from __future__ import annotations

import re

import pytest

from rollplex.rewards.ready import choice, exact, format  # noqa: A004 - the names that users write
from rollplex.rewards.ready.words import named_letter


@pytest.mark.parametrize(
    ("text", "right", "reward"),
    [
        ("Seven", "seven", 1.0),
        ("  seven.\n", "seven", 1.0),
        ("two  words", "two\nwords", 1.0),
        ("\uff17", "7", 1.0),
        ("<answer>7</answer>", 7, 1.0),
        ("7.0", 7, 0.0),
        ("the seven", "seven", 0.0),
        ("", "seven", 0.0),
        ("cat", ["dog", "cat"], 1.0),
        ("True", True, 1.0),
    ],
)
def test_exact_compares_words(text: str, right: object, reward: float) -> None:
    assert exact([text, "!"], answer=[right] * 2) == [reward, 0.0]


def test_exact_can_tell_cases_apart_and_take_another_column() -> None:
    assert exact(["Cat"], answer=["cat"], ignore_case=False) == [0.0]
    assert exact(["Cat"], answer=["dog"], label=["cat"], column="label") == [1.0]


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        (" (b) ", "B"),
        ("B.", "B"),
        ("[C]:", "C"),
        ("B) a dog", "B"),
        ("(B) a dog with a C", "B"),
        ("The answer is C, not B", "C"),
        ("Answer: (D)", "D"),
        ("The answer is **D**", "D"),
        ("I take option A at first, but the answer is B.", "B"),
        ("A cat sits on the sofa, so C", "C"),
        ("I think it is D", "D"),
        ("B or C", None),
        ("a big dog", None),
        ("because", None),
        ("", None),
        ("Z", None),
    ],
)
def test_a_letter_is_named_by_the_first_rule_that_finds_one(text: str, letter: str | None) -> None:
    assert named_letter(text) == letter


def test_choice_compares_letters() -> None:
    texts = ["<think>A?</think><answer>B</answer>", "The answer is (B).", "C", "", "B or C"]
    for right in ("B", "b", "(B)", "B. a dog"):
        assert choice(texts, answer=[right] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert choice(["x"], answer=["X"], letters="XYZ") == [1.0]
    with pytest.raises(ValueError, match="names none of the letters ABCDEFGHIJ: 'a dog'"):
        choice(["B"], answer=["a dog"])


GOOD = "<think>\nhm\n</think>\n<answer>7</answer>"


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (GOOD, 1.0),
        (f"\n{GOOD} ", 1.0),
        ("<think></think><answer></answer>", 1.0),
        (f"well, {GOOD}", 0.0),
        (f"{GOOD}.", 0.0),
        (GOOD.replace("</think>", "</think> so"), 0.0),
        ("<think><think>a</think></think><answer>7</answer>", 0.0),
        (f"{GOOD}<answer>8</answer>", 0.0),
        ("<answer>7</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format_wants_each_tag_once(text: str, reward: float) -> None:
    assert format([text]) == [reward]


def test_format_takes_any_pattern() -> None:
    assert format([" 12 ", "a"], pattern=r"\d+", answer=["7"] * 2) == [1.0, 0.0]
    with pytest.raises(re.error):
        format(["a"], pattern="(")
