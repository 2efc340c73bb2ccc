"""Whether the rows have what the reward functions require."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rollplex.errors import RewardError
from rollplex.protocol.inputs import Column, SourceChecked
from rollplex.protocol.reward import RequiredColumns
from rollplex_coordinator.decisions.columns import check_columns

FUNCTIONS = ("rewards.py:free", "rewards.py:kw")


def source(
    *columns: Column, name: str = "train", num_rows: int = 9, good_rows: tuple[int, ...] | None = None
) -> SourceChecked:
    return SourceChecked(
        name=name,
        fingerprint="f",
        num_rows=num_rows,
        good_rows=good_rows,
        rejected=(),
        max_prompt_tokens=1,
        max_media_rows=0,
        max_media_tokens=0,
        columns=columns,
        place="rows.jsonl:1 (row 0)",
    )


def requires(*names: str) -> tuple[RequiredColumns, RequiredColumns]:
    return RequiredColumns(), RequiredColumns(names=names)


def refused(*sources: SourceChecked, names: tuple[str, ...]) -> str:
    with pytest.raises(RewardError) as caught:
        check_columns(sources, FUNCTIONS, requires(*names))
    return str(caught.value)


ANSWER = Column(name="answer", rows=9)


def test_columns_that_every_row_has_pass() -> None:
    check_columns([source(ANSWER)], FUNCTIONS, requires("answer"))
    check_columns([source(Column(name="answer", rows=3), good_rows=(0, 2, 4))], FUNCTIONS, requires("answer"))


def test_what_is_not_known_is_not_judged() -> None:
    check_columns([source()], FUNCTIONS, ())
    unknown = SourceChecked(
        name="train",
        fingerprint="f",
        num_rows=9,
        good_rows=None,
        rejected=(),
        max_prompt_tokens=1,
        max_media_rows=0,
        max_media_tokens=0,
    )
    check_columns([unknown], FUNCTIONS, requires("answer"))


def test_a_column_that_one_row_lacks_is_named_with_the_function_and_the_row() -> None:
    level = Column(name="level", rows=8, place="rows.jsonl:5 (row 4)")
    assert refused(source(ANSWER, level), names=("answer", "level")) == (
        "rows.jsonl:5 (row 4): A reward function requires a column that rows lack; "
        "got argument 'level' of rewards.py:kw; 1 of the 9 rows of 'train' lacks it, this one first; "
        "needed a column that every row has: answer. "
        "Mend the rows, or give the argument a default, or a value in rewards.functions.options."
    )


def test_a_column_that_no_row_has_is_lacked_by_the_first() -> None:
    said = refused(source(), names=("level",))
    assert said.startswith("rows.jsonl:1 (row 0): ")
    assert "9 of the 9 rows of 'train' lack it" in said
    assert "needed a column that every row has: there is none." in said


def test_rows_that_were_left_out_do_not_count() -> None:
    level = Column(name="level", rows=1, place="rows.jsonl:3 (row 2)")
    assert "1 of the 2 rows of 'train' lacks it" in refused(source(level, good_rows=(0, 2)), names=("level",))


def test_an_evaluation_is_looked_at_too() -> None:
    held_out = source(Column(name="answer", rows=7, place="held.jsonl:2 (row 1)"), name="held_out")
    said = refused(source(ANSWER), held_out, names=("answer",))
    assert said.startswith("held.jsonl:2 (row 1): ")
    assert "2 of the 9 rows of 'held_out' lack it" in said


@pytest.mark.parametrize(("name", "meant"), [("answr", "answer"), ("prompt", "prompts"), ("completion", "completions")])
def test_a_misspelt_name_is_told_what_it_may_mean(name: str, meant: str) -> None:
    assert f"Did you mean {meant}? Otherwise mend the rows, or" in refused(source(ANSWER), names=(name,))


def test_of_many_columns_a_few_are_shown() -> None:
    many = [Column(name=f"c{number:02}", rows=9) for number in range(30)]
    said = refused(source(*many), names=("answer",))
    assert "c19, …. Mend" in said
    assert "c20" not in said


def test_a_right_answer_that_a_row_lacks_is_refused_where_a_function_requires_one() -> None:
    some = replace(source(), answers=Column(name="right answer", rows=7, place="rows.jsonl:4 (row 3)"))
    check_columns([some], FUNCTIONS, requires())
    check_columns([source()], FUNCTIONS, (RequiredColumns(answer=True),))
    whole = replace(some, answers=Column(name="right answer", rows=9))
    check_columns([whole], FUNCTIONS, (RequiredColumns(answer=True),))
    with pytest.raises(RewardError) as caught:
        check_columns([some], FUNCTIONS, (RequiredColumns(answer=True),))
    assert str(caught.value) == (
        "rows.jsonl:4 (row 3): A reward function requires the right answer, which rows lack; "
        "got rewards.py:free; 2 of the 9 rows of 'train' lack it, this one first; "
        "needed reward_model.ground_truth, or one of ground_truth, answer, solution, and not null. Mend the rows."
    )
