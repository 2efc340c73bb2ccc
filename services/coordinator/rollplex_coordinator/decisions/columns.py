"""Whether every row has the columns that the reward functions require. Pure."""

from __future__ import annotations

from collections.abc import Sequence

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
        RewardError: a row lacks a column; names function, argument, dataset and the first such row.
    """
    for function, columns in zip(functions, required, strict=False):
        for source in sources:
            if source.columns is None:
                continue
            found = {column.name: column for column in source.columns}
            for name in columns.names:
                column = found.get(name, Column(name=name, rows=0, place=source.place))
                if column.rows < source.num_good:
                    raise _lacking(function, column, source)


def _lacking(function: str, column: Column, source: SourceChecked) -> RewardError:
    lacking, rows = source.num_good - column.rows, source.num_good
    everywhere = [other.name for other in source.columns or () if other.rows == rows]
    shown = ", ".join(everywhere[:MAX_NAMED]) + (", …" if len(everywhere) > MAX_NAMED else "")
    close = closest(column.name, [*everywhere, "prompts", "completions", "completion_ids"])
    meant = f"Did you mean {close}? Otherwise mend" if close else "Mend"
    return RewardError(
        "A reward function requires a column that rows lack",
        got=f"argument {column.name!r} of {function}; {lacking} of the {rows} rows of {source.name!r} "
        f"{'lacks' if lacking == 1 else 'lack'} it, this one first",
        needed=f"a column that every row has: {shown or 'there is none'}",
        do=f"{meant} the rows, or give the argument a default, or a value in rewards.functions.options.",
        where=column.place,
    )
