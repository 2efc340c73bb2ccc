"""EasyR1's signature: compute_score(reward_inputs) -> a list of dicts.

    reward_inputs              a list, one dict for each completion: response (text), response_length (tokens, the stop
                               token included), ground_truth, and the row's columns
    reward_input               one such dict; called for one completion at a time
    predicts, ground_truths    lists (EasyR1's older form)
    predict, ground_truth      texts; called for one completion at a time (predict_str too)

Each dict that comes back has the reward as "overall"; its other numbers are reported. Called by position, as EasyR1
does, so with `signature: easyr1` the arguments may have any names: one alone is taken for reward_inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeAlias

from rollplex.errors import RewardError
from rollplex.rewards.arguments import Arguments
from rollplex.rewards.call import Call

KEY = "overall"
MARKS = ("reward_inputs", "reward_input", "predicts", "predict", "predict_str")
"""The arguments by which the forms are known."""
_Bound: TypeAlias = Callable[[Call], object]


def bind(function: Callable[..., object], arguments: Arguments) -> _Bound:
    """The function as a function of a call that returns a list, one entry for each completion.

    Raises:
        RewardError: its arguments are none of the forms.
    """
    required = (*arguments.fixed, *arguments.required)
    first = required[0] if required else next(iter(arguments.names), "")
    match first, len(required):
        case "reward_input", 0 | 1:
            return _each(function, lambda call, index: (_input(call, index),))
        case "predict" | "predict_str", 2:
            return _each(function, lambda call, index: (call.texts[index], _truth(call)))
        case "predicts", 2:
            return lambda call: function(list(call.texts), [_truth(call) for _ in call.texts])
        case name, 0 | 1 if name and (name == MARKS[0] or name not in MARKS):
            return lambda call: function([_input(call, index) for index in range(len(call))])
    raise RewardError(
        "The arguments are not as EasyR1 gives them",
        got=f"({arguments.shown})",
        needed="(reward_inputs), (reward_input), (predicts, ground_truths) or (predict, ground_truth)",
        do="Give the others defaults, or their values in rewards.functions.options.",
    )


def _each(function: Callable[..., object], given: Callable[[Call, int], tuple[object, ...]]) -> _Bound:
    def each(call: Call) -> list[object]:
        returned = []
        for index in range(len(call)):
            call.sample = index
            returned.append(function(*given(call, index)))
        call.sample = None
        return returned

    return each


def _input(call: Call, index: int) -> dict[str, object]:
    return {
        **copy.deepcopy(call.columns),
        "response": call.texts[index],
        "response_length": call.lengths[index],
        "ground_truth": _truth(call),
    }


def _truth(call: Call) -> object:
    return copy.deepcopy(call.ground_truth())
