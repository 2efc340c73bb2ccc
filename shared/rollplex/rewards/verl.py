"""verl's signature: compute_score(data_source, solution_str, ground_truth, extra_info) -> a number, for one completion.

    data_source    the column, or the dataset's name in the configuration
    solution_str   the completion's text, without special tokens
    ground_truth   reward_model.ground_truth, or the column ground_truth, answer or solution
    extra_info     the column, or {}

A function gets those that it names. It returns a number, or a dict with the number as "score" and further numbers,
which are reported (verl's `reward_extra_info`). The form for batches (data_sources, solution_strs, ground_truths,
extra_infos, each a list) is known by its names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from rollplex.rewards.arguments import Arguments
from rollplex.rewards.call import Call

KEY = "score"
ONE, MANY = "solution_str", "solution_strs"
"""The arguments by which the two forms are known."""
_PLURAL = {
    "data_source": "data_sources",
    ONE: MANY,
    "ground_truth": "ground_truths",
    "extra_info": "extra_infos",
}


def needs_answer(arguments: Arguments) -> bool:
    """Whether the function gets the right answer, so that a row without one is an error."""
    return arguments.takes(_PLURAL["ground_truth"] if MANY in arguments.names else "ground_truth")


def bind(function: Callable[..., object], arguments: Arguments) -> Callable[[Call], object]:
    """The function as a function of a call that returns a list, one entry for each completion.

    Raises:
        RewardError: it cannot be called with keywords alone, or not with these.
    """
    arguments.refuse_fixed()
    many = MANY in arguments.names
    arguments.refuse_required(list(_PLURAL.values() if many else _PLURAL), "verl's")
    if many:
        return lambda call: function(**arguments.pick(_many(call, arguments)))

    def each(call: Call) -> list[object]:
        returned = []
        for index, text in enumerate(call.texts):
            call.sample = index
            returned.append(function(**arguments.pick({**_common(call, arguments, _same), ONE: text})))
        call.sample = None
        return returned

    return each


def _many(call: Call, arguments: Arguments) -> dict[str, object]:
    values = [_common(call, arguments, _PLURAL.__getitem__) for _ in call.texts]
    names = values[0]
    return {**{name: [value[name] for value in values] for name in names}, MANY: list(call.texts)}


def _common(call: Call, arguments: Arguments, named: Callable[[str], str]) -> dict[str, object]:
    """What is the same for each completion; copies, so that no call sees what another changed."""
    extra = call.row.get("extra_info")
    values: dict[str, object] = {
        named("data_source"): call.row.get("data_source", call.source),
        named("extra_info"): {} if extra is None else copy.deepcopy(extra),
    }
    if arguments.takes(named("ground_truth")):
        values[named("ground_truth")] = copy.deepcopy(call.ground_truth())
    return values


def _same(name: str) -> str:
    return name
