"""Which arguments a function has, and which of them a call gives."""

from __future__ import annotations

from typing import Any

import pytest

from rollplex.errors import RewardError
from rollplex.rewards.arguments import Arguments


def test_a_function_gets_what_it_names() -> None:
    def some(completions: Any, answer: Any, other: Any = None) -> None: ...
    def every(completions: Any, **columns: Any) -> None: ...
    def none() -> None: ...

    given: dict[str, object] = {"prompts": [1], "completions": [2], "completion_ids": [3], "answer": [4]}
    assert Arguments(some).pick(given) == {"completions": [2], "answer": [4]}
    assert Arguments(every).pick(given) == given
    assert Arguments(none).pick(given) == {}


def test_an_object_with_call_is_a_function() -> None:
    class Judge:
        def __call__(self, *, prompts: Any) -> None: ...

    assert Arguments(Judge()).pick({"prompts": [1], "answer": [2]}) == {"prompts": [1]}


def test_what_the_row_lacks_is_named() -> None:
    def wants(completions: Any, answer: Any) -> None: ...

    with pytest.raises(RewardError, match=r"\['answer'\].*some of \['completions', 'prompts'\]"):
        Arguments(wants).pick({"prompts": [1], "completions": [2]})


def test_an_option_is_never_replaced_by_a_column_of_its_name_and_never_asked_for() -> None:
    def f(completions: Any, answer: Any, *, level: Any) -> None: ...

    arguments = Arguments(f, {"answer": 1, "level": 2})
    assert arguments.required == ("completions",)
    assert arguments.pick({"completions": [1], "answer": [2], "level": [3]}) == {"completions": [1]}


def test_an_option_that_the_function_does_not_take_is_refused_with_a_suggestion() -> None:
    def f(completions: Any, tolerance: float = 0.1) -> None: ...
    def g(completions: Any, **kwargs: Any) -> None: ...

    with pytest.raises(RewardError) as caught:
        Arguments(f, {"tolerence": 1})
    assert str(caught.value) == (
        "The function has no argument 'tolerence', which its options name; got (completions, tolerance=0.1). "
        "Did you mean tolerance?"
    )
    taken = Arguments(g, {"tolerence": 1})
    assert taken.pick({"completions": [1], "tolerence": [2], "answer": [3]}) == {"completions": [1], "answer": [3]}


def test_what_does_not_show_its_arguments_is_refused() -> None:
    with pytest.raises(RewardError, match="does not show its arguments"):
        Arguments(dict)
