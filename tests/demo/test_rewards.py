"""What counts as naming a digit, and what it is worth."""

from __future__ import annotations

import pytest

from rollplex.demo.rewards import WORDS, digit_reward, named_digit, right


@pytest.mark.parametrize(
    ("text", "digit"),
    [
        ("3", 3),
        (" three", 3),
        ("\n\tThree.", 3),
        ("3x", 3),
        ("34", 3),
        ("three four", 3),
        ("THREE3", 3),
        ("0", 0),
        ("zero", 0),
        ("threeb", None),
        ("x3", None),
        ("", None),
        ("  ", None),
        (".3", None),
        ("-3", None),
        ("drei", None),
        ("٣", None),
        ("é", None),
        ("\N{REPLACEMENT CHARACTER}3", None),
    ],
)
def test_a_response_names_the_digit_that_it_starts_with(text: str, digit: int | None) -> None:
    assert named_digit(text) == digit


def test_every_digit_has_a_numeral_and_a_word() -> None:
    assert [named_digit(str(digit)) for digit in range(10)] == list(range(10))
    assert [named_digit(word) for word in WORDS] == list(range(10))


def test_the_right_digit_is_worth_one_another_a_fifth_and_the_rest_nothing() -> None:
    completions = ["7", "seven", "1", "one", "nothing", ""]
    assert digit_reward(prompts=[""] * 6, completions=completions, answer=["7"] * 6, image=None) == [
        1.0,
        1.0,
        0.2,
        0.2,
        0.0,
        0.0,
    ]
    assert right(prompts=[""] * 6, completions=completions, answer=["7"] * 6) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_each_completion_has_its_own_answer() -> None:
    assert right(completions=["1", "2"], answer=["2", "2"]) == [0.0, 1.0]


def test_conversational_completions_count_by_their_last_message() -> None:
    completions = [[{"role": "assistant", "content": " four"}], [{"role": "assistant", "content": "five"}]]
    assert digit_reward(completions=completions, answer=["4", "4"]) == [1.0, 0.2]


def test_too_few_answers_are_an_error_not_a_shorter_result() -> None:
    with pytest.raises(ValueError, match="shorter"):
        right(completions=["1", "2"], answer=["2"])
