"""EasyR1's signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollplex.errors import RewardError
from rollplex.protocol.reward import Form
from rollplex.rewards.arguments import Arguments
from rollplex.rewards.call import Call
from rollplex.rewards.easyr1 import bind
from rollplex.rewards.signature import adapt

MakeCall = Callable[..., Call]
ROW: dict[str, object] = {"prompt": "a", "answer": "7", "level": 2}
INPUTS = [
    {"response": text, "response_length": length, "ground_truth": "7", "answer": "7", "level": 2}
    for text, length in (("7", 2), ("8", 2), ("", 1))
]


def called(function: Callable[..., Any], call: Call) -> Any:
    return bind(function, Arguments(function))(call)


def test_a_batch_is_a_list_of_dicts(make_call: MakeCall) -> None:
    assert called(lambda reward_inputs, weight=0.5: reward_inputs, make_call(ROW)) == INPUTS


def test_one_dict_at_a_time(make_call: MakeCall) -> None:
    call = make_call(ROW)
    assert called(lambda reward_input: reward_input, call) == INPUTS
    assert call.sample is None


def test_the_older_forms_take_texts(make_call: MakeCall) -> None:
    texts = ["7", "8", ""]
    assert called(lambda predicts, ground_truths: (predicts, ground_truths), make_call(ROW)) == (texts, ["7"] * 3)
    pairs = [(text, "7") for text in texts]
    assert called(lambda predict, ground_truth: (predict, ground_truth), make_call(ROW)) == pairs
    assert called(lambda predict_str, ground_truth: (predict_str, ground_truth), make_call(ROW)) == pairs


def test_by_position_the_argument_may_have_any_name(make_call: MakeCall) -> None:
    def f(batch: Any, /) -> Any:
        return batch

    assert called(f, make_call(ROW)) == INPUTS
    assert called(lambda batch, scale=1: batch, make_call(ROW)) == INPUTS


@pytest.mark.parametrize(
    "function",
    [
        lambda reward_inputs, tokenizer: None,
        lambda predicts: None,
        lambda predicts, ground_truths, questions: None,
        lambda: None,
        lambda **kwargs: None,
    ],
)
def test_other_arguments_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(RewardError, match="not as EasyR1 gives them"):
        bind(function, Arguments(function))


def test_options_are_given_beside_it(make_call: MakeCall) -> None:
    adapted = adapt(lambda reward_inputs, most: (len(reward_inputs), most), Form.AUTO, {"most": 16})
    assert adapted.call(make_call(ROW)) == (3, 16)


def test_nothing_that_a_function_changes_is_seen_by_the_next_sample(make_call: MakeCall) -> None:
    row: dict[str, object] = {"prompt": "a", "answer": ["7"]}

    def f(reward_input: Any) -> int:
        reward_input["ground_truth"].append("8")
        reward_input["answer"].append("9")
        return len(reward_input["answer"])

    assert called(f, make_call(row)) == [2, 2, 2]
