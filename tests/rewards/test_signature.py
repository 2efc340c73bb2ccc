"""Whose signature a function is taken to have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from rollplex.errors import RewardError
from rollplex.protocol.reward import Form
from rollplex.rewards.call import Call
from rollplex.rewards.ready.words import choice, exact
from rollplex.rewards.ready.words import format as words
from rollplex.rewards.signature import adapt


def made(arguments: str) -> Callable[..., Any]:
    """A function with these arguments."""
    names: dict[str, Any] = {}
    exec(f"def f({arguments}): return locals()", names)  # noqa: S102 - the test's own text
    function: Callable[..., Any] = names["f"]
    return function


@pytest.mark.parametrize(
    ("arguments", "form", "mark"),
    [
        ("completions, answer", Form.TRL, "completions"),
        ("prompts, completions, **kwargs", Form.TRL, "prompts, completions"),
        ("completion_ids", Form.TRL, "completion_ids"),
        ("*, finish_reasons", Form.TRL, "finish_reasons"),
        ("completions, data_source, ground_truth, extra_info", Form.TRL, "completions"),
        ("ground_truth, **kwargs", Form.TRL, "**kwargs"),
        ("**kwargs", Form.TRL, "**kwargs"),
        ("data_source, solution_str, ground_truth, extra_info=None", Form.VERL, "solution_str"),
        ("solution_str, ground_truth, method='strict', **kwargs", Form.VERL, "solution_str"),
        ("data_sources, solution_strs, ground_truths, extra_infos", Form.VERL, "solution_strs"),
        ("reward_inputs, format_weight=0.1", Form.EASYR1, "reward_inputs"),
        ("reward_inputs, /", Form.EASYR1, "reward_inputs"),
        ("reward_input, format_weight=0.5", Form.EASYR1, "reward_input"),
        ("predicts, ground_truths, format_weight=0.1", Form.EASYR1, "predicts"),
        ("predict_str, ground_truth", Form.EASYR1, "predict_str"),
    ],
)
def test_the_form_is_told_from_the_names_of_the_arguments(arguments: str, form: Form, mark: str) -> None:
    adapted = adapt(made(arguments), Form.AUTO, {})
    assert adapted.form is form
    assert adapted.why == f"because of {mark}; arguments ({arguments})"


@pytest.mark.parametrize("arguments", ["", "text, label", "ground_truth, extra_info", "answer, step", "*texts"])
def test_a_function_that_fits_no_form_is_refused_with_its_arguments_and_the_three_forms(arguments: str) -> None:
    with pytest.raises(RewardError) as caught:
        adapt(made(arguments), Form.AUTO, {})
    assert str(caught.value) == (
        f"The arguments of this function fit no signature; got ({arguments}); "
        "needed TRL's (prompts, completions, <columns>, **kwargs), "
        "verl's (data_source, solution_str, ground_truth, extra_info) or EasyR1's (reward_inputs). "
        "Rename them, or say which it is: rewards.functions[…].signature: trl, verl or easyr1."
    )


def test_a_function_that_fits_two_forms_is_refused_and_the_configuration_decides() -> None:
    function = made("completions, solution_str='x'")
    with pytest.raises(RewardError) as caught:
        adapt(function, Form.AUTO, {})
    assert caught.value.what == "The arguments of this function fit two signatures"
    assert caught.value.got == "(completions, solution_str='x'): completions (TRL's) and solution_str (verl's)"
    assert adapt(function, Form.TRL, {}).form is Form.TRL
    assert adapt(function, Form.TRL, {}).why == (
        "because the configuration says so; arguments (completions, solution_str='x')"
    )


@pytest.mark.parametrize(
    ("arguments", "form", "columns"),
    [
        ("completions, solution, **kwargs", Form.AUTO, ("solution",)),
        ("completions, *, solution, level", Form.AUTO, ("solution", "level")),
        ("completions, prompt", Form.AUTO, ("prompt",)),
        ("completions, solution='', *rest, level=1, **kwargs", Form.AUTO, ()),
        ("completions, fixed", Form.AUTO, ()),
        ("prompts, completions, completion_ids, completion_lengths, finish_reasons", Form.AUTO, ()),
        ("completions, step, trainer_state, log_metric, pil_images", Form.AUTO, ()),
        ("solution_str, ground_truth, extra_info, data_source", Form.AUTO, ()),
        ("solution_strs, ground_truths", Form.AUTO, ()),
        ("reward_inputs", Form.AUTO, ()),
        ("anything", Form.EASYR1, ()),
    ],
)
def test_the_columns_that_every_row_must_have_are_those_that_no_form_and_no_default_gives(
    arguments: str, form: Form, columns: tuple[str, ...]
) -> None:
    options = {"fixed": 1} if "fixed" in arguments else {}
    assert adapt(made(arguments), form, options).columns == columns


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ("completions, ground_truth", False),
        ("solution_str, ground_truth", True),
        ("solution_str, ground_truth=None", True),
        ("solution_str, **kwargs", True),
        ("solution_str, extra_info", False),
        ("solution_strs, ground_truths", True),
        ("solution_strs", False),
        ("reward_inputs", True),
    ],
)
def test_a_right_answer_is_required_by_every_form_that_gives_it(
    arguments: str, answer: bool, make_call: Callable[..., Call]
) -> None:
    adapted = adapt(made(arguments), Form.AUTO, {})
    assert adapted.answer is answer
    if adapted.form is not Form.TRL:  # whose ground_truth is a column as any other
        with pytest.raises(RewardError, match="no right answer") if answer else nullcontext():
            adapted.call(make_call({"prompt": "a"}))


@pytest.mark.parametrize(
    ("function", "options", "answer"),
    [(exact, {}, True), (exact, {"column": "label"}, False), (choice, {}, True), (words, {}, False)],
)
def test_ready_made_functions_that_compare_require_a_right_answer(
    function: Callable[..., Any], options: dict[str, object], answer: bool
) -> None:
    assert adapt(function, Form.AUTO, options).answer is answer


def test_what_the_options_fix_is_no_mark(make_call: Callable[..., Call]) -> None:
    adapted = adapt(made("completions, solution_str"), Form.AUTO, {"solution_str": "fixed"})
    assert adapted.form is Form.TRL
    assert adapted.call(make_call({"prompt": "a", "solution_str": "column"})) == {
        "completions": ["7", "8", ""],
        "solution_str": "fixed",
    }


@pytest.mark.parametrize(("arguments", "form"), [("prompts, /", Form.AUTO), ("text, /", Form.VERL)])
def test_arguments_by_position_only_are_refused_but_by_easyr1(arguments: str, form: Form) -> None:
    with pytest.raises(RewardError, match="by position only"):
        adapt(made(arguments), form, {})
    assert adapt(made("text, /"), Form.EASYR1, {}).form is Form.EASYR1
