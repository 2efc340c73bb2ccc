"""Whether every row has the columns, and the right answer, that the reward functions require. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rollplex.data.columns import ANSWER_PLACES
from rollplex.errors import RewardError
from rollplex.protocol.inputs import Column, SourceChecked
from rollplex.protocol.reward import RequiredColumns
from rollplex.similar import closest

MAX_NAMED = 20


def check_columns(
    sources: Sequence[SourceChecked], functions: Sequence[str], required: Sequence[RequiredColumns]
) -> None:
    """Refuse a function that could not be called for some row: it would fail when that row's turn comes, perhaps late.

    Args:
        functions: as the configuration names them.
        required: what each of them requires; empty: not known.

    Raises:
        RewardError: a row lacks a column or an answer; names function, argument, dataset and the first such row.
    """
    for function, columns in zip(functions, required, strict=False):
        for source in sources:
            if columns.answer and source.answers is not None and source.answers.rows < source.num_good:
                raise _unanswered(function, source.answers, source)
            if source.columns is None:
                continue
            found = {column.name: column for column in source.columns}
            for name in columns.names:
                column = found.get(name, Column(name=name, rows=0, place=source.place))
                if column.rows < source.num_good:
                    raise _lacking(function, column, source)


def _unanswered(function: str, answers: Column, source: SourceChecked) -> RewardError:
    return RewardError(
        "A reward function requires the right answer, which rows lack",
        got=f"{function}; {_counted(answers, source)}",
        needed=f"{ANSWER_PLACES}, and not null",
        do="Mend the rows.",
        where=answers.place,
    )


def _counted(column: Column, source: SourceChecked) -> str:
    lacking = source.num_good - column.rows
    verb = "lacks" if lacking == 1 else "lack"
    return f"{lacking} of the {source.num_good} rows of {source.name!r} {verb} it, this one first"


def _lacking(function: str, column: Column, source: SourceChecked) -> RewardError:
    everywhere = [other.name for other in source.columns or () if other.rows == source.num_good]
    shown = ", ".join(everywhere[:MAX_NAMED]) + (", …" if len(everywhere) > MAX_NAMED else "")
    close = closest(column.name, [*everywhere, "prompts", "completions", "completion_ids"])
    meant = f"Did you mean {close}? Otherwise mend" if close else "Mend"
    return RewardError(
        "A reward function requires a column that rows lack",
        got=f"argument {column.name!r} of {function}; {_counted(column, source)}",
        needed=f"a column that every row has: {shown or 'there is none'}",
        do=f"{meant} the rows, or give the argument a default, or a value in rewards.functions.options.",
        where=column.place,
    )
