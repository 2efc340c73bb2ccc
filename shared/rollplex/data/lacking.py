"""Which columns, and right answers, the good rows have, and the first row that lacks one: gathered row by row. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rollplex.protocol.inputs import MAX_COLUMNS, Column

MAX_NAME_CHARS = 256
ANSWER = "right answer"


class ColumnTally:
    """Counts the rows that have each column; of a column that can be no argument's name nothing is kept.

    Args:
        where: a row as errors name it.
    """

    def __init__(self, where: Callable[[int], str]) -> None:
        self._where = where
        self._first = -1
        self._rows: dict[str, int] = {}
        self._lacks: dict[str, int] = {}
        """The first row that lacks it."""
        self._everywhere: tuple[str, ...] = ()
        """Columns that all rows so far have: the only ones that a row can be the first to lack."""
        self._too_many = False
        self._answered = 0
        self._unanswered: int | None = None
        """The first row without a right answer."""

    def add(self, columns: Collection[str], number: int, *, answered: bool = False) -> None:
        """Take in one good row; rows come in ascending order.

        Args:
            columns: those that it has.
            answered: whether it has a right answer.
        """
        self._answered += answered
        if not answered and self._unanswered is None:
            self._unanswered = number
        if self._too_many:
            return
        names = {name for name in columns if name.isidentifier() and len(name) <= MAX_NAME_CHARS}
        if self._first < 0:
            self._first, self._everywhere = number, tuple(names)
        for name in names:
            if name not in self._rows and name not in self._everywhere:
                self._lacks[name] = self._first
            self._rows[name] = self._rows.get(name, 0) + 1
        lost = [name for name in self._everywhere if name not in names]
        if lost:
            self._lacks.update(dict.fromkeys(lost, number))
            self._everywhere = tuple(name for name in self._everywhere if name in names)
        if len(self._rows) > MAX_COLUMNS:
            self._too_many = True
            self._rows, self._lacks = {}, {}

    @property
    def place(self) -> str:
        """The first row; empty if there is none."""
        return self._where(self._first) if self._first >= 0 else ""

    def columns(self) -> tuple[Column, ...] | None:
        """By name; None if there are too many."""
        if self._too_many:
            return None
        return tuple(
            Column(name=name, rows=rows, place=self._place(self._lacks.get(name)))
            for name, rows in sorted(self._rows.items())
        )

    @property
    def answers(self) -> Column:
        """The right answers, as if they were a column."""
        return Column(name=ANSWER, rows=self._answered, place=self._place(self._unanswered))

    def _place(self, number: int | None) -> str:
        return "" if number is None else self._where(number)
