"""TRL's batch signature."""

from __future__ import annotations

from typing import Any

import pytest

from rollplex.errors import RewardError
from rollplex.rewards.signature import Signature, batch

CHAT = [{"role": "user", "content": "which digit?"}]


def test_a_conversational_prompt_gives_conversational_completions() -> None:
    given = batch({"prompt": CHAT, "answer": "7"}, ["7", "8"], [[1], [2, 3]])
    assert given == {
        "prompts": [CHAT, CHAT],
        "completions": [[{"role": "assistant", "content": "7"}], [{"role": "assistant", "content": "8"}]],
        "completion_ids": [[1], [2, 3]],
        "answer": ["7", "7"],
    }


def test_a_plain_prompt_gives_plain_texts() -> None:
    given = batch({"prompt": "2 + 2 = ", "completion": "x", "n": 3}, ["4"], [[1]])
    assert given == {"prompts": ["2 + 2 = "], "completions": ["4"], "completion_ids": [[1]], "n": [3]}


def test_a_function_gets_what_it_names() -> None:
    def some(completions: Any, answer: Any, other: Any = None) -> None: ...
    def every(completions: Any, **columns: Any) -> None: ...
    def none() -> None: ...

    given: dict[str, list[object]] = {"prompts": [1], "completions": [2], "completion_ids": [3], "answer": [4]}
    assert Signature(some).pick(given) == {"completions": [2], "answer": [4]}
    assert Signature(every).pick(given) == given
    assert Signature(none).pick(given) == {}


def test_an_object_with_call_is_a_function() -> None:
    class Judge:
        def __call__(self, *, prompts: Any) -> None: ...

    assert Signature(Judge()).pick({"prompts": [1], "answer": [2]}) == {"prompts": [1]}


def test_a_column_that_the_row_lacks_is_named() -> None:
    def wants(completions: Any, answer: Any) -> None: ...

    with pytest.raises(RewardError, match=r"\['answer'\].*some of \['completions', 'prompts'\]"):
        Signature(wants).pick({"prompts": [1], "completions": [2]})


def test_arguments_by_position_only_are_refused() -> None:
    def fixed(prompts: Any, /, **columns: Any) -> None: ...

    with pytest.raises(RewardError, match="by position only; got prompts"):
        Signature(fixed)
    with pytest.raises(RewardError, match="does not show its arguments"):
        Signature(dict)
