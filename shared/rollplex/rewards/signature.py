"""Whose signature a reward function has: TRL's, verl's or EasyR1's. Told from the names of its arguments.

    any of                                                          taken as
    prompts, completions, completion_ids, … (`trl.OFFERED`)         TRL's
    solution_str, solution_strs                                     verl's
    reward_inputs, reward_input, predicts, predict, predict_str     EasyR1's
    none of these, but **kwargs                                     TRL's
    none of these, or those of two                                  refused: `signature` in the configuration decides

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from rollplex.errors import RewardError
from rollplex.protocol.reward import Form
from rollplex.rewards import easyr1, trl, verl
from rollplex.rewards.arguments import Arguments
from rollplex.rewards.call import Call

MARKS: Mapping[Form, tuple[str, ...]] = {
    Form.TRL: trl.OFFERED,
    Form.VERL: (verl.ONE, verl.MANY),
    Form.EASYR1: easyr1.MARKS,
}
OWNERS: Mapping[Form, str] = {Form.TRL: "TRL's", Form.VERL: "verl's", Form.EASYR1: "EasyR1's"}
_THREE = (
    "TRL's (prompts, completions, <columns>, **kwargs), verl's (data_source, solution_str, ground_truth, extra_info) "
    "or EasyR1's (reward_inputs)"
)


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A function that can be called for a group.

    Args:
        call: calls it; what it returns is a list with one entry for each completion, coroutines among them.
        key: under which a dict has the reward; empty: no dicts.
        why: the arguments by which the form was told, in words.
        images: whether it asks for decoded images.
        columns: those that every row must have.
        answer: whether every row must have a right answer.
    """

    form: Form
    call: Callable[[Call], object]
    key: str
    why: str
    images: bool
    columns: tuple[str, ...]
    answer: bool


def adapt(function: Callable[..., object], wanted: Form, options: Mapping[str, object]) -> Adapted:
    """Take a function as what its arguments say it is, or as what is wanted.

    Args:
        options: given with every call.

    Raises:
        RewardError: it is none of the forms, or several.
    """
    arguments = Arguments(function, options)
    form, why = (wanted, "because the configuration says so") if wanted is not Form.AUTO else _told(arguments)
    bound = partial(function, **options) if options else function
    binds = {Form.TRL: trl.bind, Form.VERL: verl.bind, Form.EASYR1: easyr1.bind}
    keys = {Form.TRL: "", Form.VERL: verl.KEY, Form.EASYR1: easyr1.KEY}
    return Adapted(
        form=form,
        call=binds[form](bound, arguments),
        key=keys[form],
        why=f"{why}; arguments ({arguments.shown})",
        images=form is Form.TRL and trl.IMAGES in arguments.names,
        columns=trl.columns(arguments) if form is Form.TRL else (),
        answer=_needs_answer(function, form, arguments, options),
    )


def _needs_answer(
    function: Callable[..., object], form: Form, arguments: Arguments, options: Mapping[str, object]
) -> bool:
    """By its form; in TRL's a function may say it itself (`ready.texts.keeps`)."""
    match form:
        case Form.VERL:
            return verl.needs_answer(arguments)
        case Form.EASYR1:
            return True
        case _:
            column = getattr(function, "reward_answer", "")
            return bool(column) and not options.get(column)


def _told(arguments: Arguments) -> tuple[Form, str]:
    names = (*arguments.names, *arguments.fixed)
    found = {form: [name for name in marks if name in names] for form, marks in MARKS.items()}
    found = {form: marks for form, marks in found.items() if marks}
    if not found and arguments.takes_all:
        return Form.TRL, "because of **kwargs"
    if len(found) == 1:
        ((form, marks),) = found.items()
        return form, f"because of {', '.join(marks)}"
    clash = " and ".join(f"{', '.join(marks)} ({OWNERS[form]})" for form, marks in found.items())
    raise RewardError(
        f"The arguments of this function fit {'two signatures' if found else 'no signature'}",
        got=f"({arguments.shown})" + (f": {clash}" if found else ""),
        needed=_THREE,
        do="Rename them, or say which it is: rewards.functions[…].signature: trl, verl or easyr1.",
    )
