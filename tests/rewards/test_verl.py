"""verl's signature, for one completion and for batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollplex.errors import RewardError
from rollplex.rewards.arguments import Arguments
from rollplex.rewards.call import Call, answer_of
from rollplex.rewards.verl import bind

MakeCall = Callable[..., Call]
ROW: dict[str, object] = {
    "prompt": [{"role": "user", "content": "?"}],
    "data_source": "digits",
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "extra_info": {"index": 3},
}


def one(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> Any:
    return (data_source, solution_str, ground_truth, extra_info)


def called(function: Callable[..., Any], call: Call) -> Any:
    return bind(function, Arguments(function))(call)


def test_each_completion_is_scored_by_itself(make_call: MakeCall) -> None:
    returned = called(one, make_call(ROW))
    assert returned == [("digits", text, "7", {"index": 3}) for text in ("7", "8", "")]


@pytest.mark.parametrize(
    ("columns", "truth"),
    [
        ({"reward_model": {"ground_truth": 1}, "ground_truth": 2, "answer": 3, "solution": 4}, 1),
        ({"reward_model": {"style": "model"}, "ground_truth": 2, "answer": 3}, 2),
        ({"reward_model": None, "solution": 4, "answer": 3}, 3),
        ({"solution": [4]}, [4]),
    ],
)
def test_the_right_answer_is_looked_for_in_four_places(make_call: MakeCall, columns: Any, truth: Any) -> None:
    assert [item[2] for item in called(one, make_call({"prompt": "a", **columns}))] == [truth] * 3


def test_what_the_row_lacks_has_a_default_but_the_answer(make_call: MakeCall) -> None:
    call = make_call({"prompt": "a", "answer": "7", "extra_info": None})
    assert called(one, call)[0] == ("train", "7", "7", {})
    with pytest.raises(
        RewardError, match=r"no right answer; got columns \['level'\]; needed reward_model.ground_truth"
    ):
        called(one, make_call({"prompt": "a", "level": 1}))
    assert called(lambda solution_str: solution_str, make_call({"prompt": "a"})) == ["7", "8", ""]


def test_no_sample_sees_what_another_changed(make_call: MakeCall) -> None:
    def f(solution_str: str, extra_info: dict[str, object]) -> object:
        extra_info["seen"] = len(extra_info)
        return extra_info["seen"]

    assert called(f, make_call(ROW)) == [1, 1, 1]


def test_the_sample_that_is_being_scored_is_known_while_it_is(make_call: MakeCall) -> None:
    def f(solution_str: str) -> float:
        return 1 / len(solution_str)

    call = make_call(ROW)
    with pytest.raises(ZeroDivisionError):
        called(f, call)
    assert call.sample == 2
    call = make_call(ROW)
    called(one, call)
    assert call.sample is None


def test_a_batch_is_given_at_once(make_call: MakeCall) -> None:
    def many(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any) -> Any:
        return list(zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True))

    assert called(many, make_call(ROW)) == called(one, make_call(ROW))


@pytest.mark.parametrize(
    "row",
    [
        {"ground_truth": None, "answer": "3"},
        {"reward_model": {"ground_truth": None}, "answer": "3"},
        {"reward_model": None, "ground_truth": None, "solution": "3"},
    ],
)
def test_a_column_that_a_table_filled_with_null_is_no_answer(row: dict[str, object]) -> None:
    assert answer_of(row) == "3"


def test_a_row_whose_answers_are_all_null_is_refused() -> None:
    with pytest.raises(RewardError, match="The row has no right answer"):
        answer_of({"reward_model": {"ground_truth": None}, "ground_truth": None, "answer": None})


@pytest.mark.parametrize("arguments", ["solution_str, level", "solution_strs, level", "solution_str, solution_strs"])
def test_a_function_that_requires_what_is_never_given_is_refused(arguments: str) -> None:
    names: dict[str, Any] = {}
    exec(f"def f({arguments}): pass", names)  # noqa: S102 - the test's own text
    with pytest.raises(RewardError, match=r"asks for what verl's form does not give; got arguments \['"):
        bind(names["f"], Arguments(names["f"]))
