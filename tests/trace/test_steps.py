"""Which iterations `--steps` means."""

from __future__ import annotations

import pytest

from rollplex.errors import ConfigError
from rollplex.trace.steps import Steps, newest, parse_steps, ranges, span


@pytest.mark.parametrize(
    ("text", "inside"),
    [("2:4", [2, 3]), ("8:", [8, 9]), (":2", [0, 1]), ("5", [5]), (" 0:1 ", [0]), ("0", [0])],
)
def test_a_range_is_a_slice_and_a_number_is_one_iteration(text: str, inside: list[int]) -> None:
    steps = parse_steps(text)
    assert [step for step in range(10) if step in steps] == inside


@pytest.mark.parametrize("text", ["", ":", "4:4", "5:2", "-1", "a:b", "1:2:3", "1.5", "9" * 20, ":0", "٣"])
def test_anything_else_is_refused_with_what_was_given(text: str) -> None:
    with pytest.raises(ConfigError, match="--steps") as raised:
        parse_steps(text)
    assert text in raised.value.got


def test_newest_takes_the_last_ones_and_all_when_they_are_few() -> None:
    assert newest([3, 4, 5, 6], 2) == Steps(first=5)
    assert newest([3, 4], 2) == newest([], 2) == Steps()


def test_iterations_in_words() -> None:
    assert [span([]), span([3]), span([3, 4, 9])] == ["no iteration", "iteration 3", "iterations 3 to 9"]
    assert ranges((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"
    assert ranges(()) == ""
