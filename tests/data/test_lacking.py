"""Which columns rows have, and which row is the first without one."""

from __future__ import annotations

import pytest

from rollplex.data.lacking import ANSWER, ColumnTally
from rollplex.protocol.inputs import MAX_COLUMNS, Column


def tally_of(rows: dict[int, list[str]]) -> ColumnTally:
    tally = ColumnTally(lambda number: f"row {number}")
    for number, columns in rows.items():
        tally.add(columns, number)
    return tally


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ({0: ["a", "b"], 1: ["b", "a"]}, {"a": (2, ""), "b": (2, "")}),
        ({0: ["a", "b"], 1: ["a"], 2: ["a"]}, {"a": (3, ""), "b": (1, "row 1")}),
        ({0: ["a"], 1: ["a", "b"], 2: ["a", "b"]}, {"a": (3, ""), "b": (2, "row 0")}),
        ({3: ["a"], 5: [], 8: ["b"]}, {"a": (1, "row 5"), "b": (1, "row 3")}),
        ({0: ["a"], 1: [], 2: ["a"], 3: []}, {"a": (2, "row 1")}),
        ({0: [], 1: ["a"]}, {"a": (1, "row 0")}),
        ({0: ["no name", "a" * 300, "1a", "a"]}, {"a": (1, "")}),
        ({}, {}),
    ],
)
def test_the_rows_of_each_column_are_counted_and_the_first_without_it_is_named(
    rows: dict[int, list[str]], found: dict[str, tuple[int, str]]
) -> None:
    tally = tally_of(rows)
    assert tally.columns() == tuple(Column(name=name, rows=n, place=place) for name, (n, place) in found.items())
    assert tally.place == (f"row {min(rows)}" if rows else "")


def test_of_too_many_columns_nothing_is_said() -> None:
    rows = {number: ["a", f"c{number}"] for number in range(MAX_COLUMNS)}
    assert tally_of(rows).columns() is None
    del rows[MAX_COLUMNS - 1]
    found = tally_of(rows).columns()
    assert found is not None
    assert len(found) == MAX_COLUMNS
    assert found[0] == Column(name="a", rows=MAX_COLUMNS - 1)


def test_rows_with_a_right_answer_are_counted_and_the_first_without_one_is_named() -> None:
    tally = ColumnTally(lambda number: f"row {number}")
    tally.add(["answer"], 2, answered=True)
    assert tally.answers == Column(name=ANSWER, rows=1)
    tally.add(["answer"], 5, answered=False)
    tally.add(["answer"], 6, answered=False)
    assert tally.answers == Column(name=ANSWER, rows=1, place="row 5")
