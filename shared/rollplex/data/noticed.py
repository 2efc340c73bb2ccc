"""What is odd about a dataset without being wrong: gathered over its rows, told in a sentence for each kind. Pure."""

from __future__ import annotations

from rollplex.data.checking import RowFacts

MAX_ROWS_NAMED = 5


class Noticed:
    """Gathers oddities row by row."""

    def __init__(self) -> None:
        self._literal: dict[str, list[int]] = {}
        self._first: dict[bytes, int] = {}
        self._again: dict[int, list[int]] = {}

    def add(self, facts: RowFacts, number: int) -> None:
        """Take in the facts of one good row."""
        for mark in facts.literal:
            self._literal.setdefault(mark, []).append(number)
        first = self._first.setdefault(facts.identity, number)
        if first != number:
            self._again.setdefault(first, [first]).append(number)

    @property
    def duplicates(self) -> tuple[tuple[int, ...], ...]:
        """Rows that have the same prompt and the same media."""
        return tuple(tuple(rows) for rows in self._again.values())

    def sentences(self) -> list[str]:
        """One for each kind of oddity; none for what there is not."""
        return [*self.marks(), *self.repetitions()]

    def marks(self) -> list[str]:
        """About marks for media in rows that have none."""
        return [
            f"{mark} stands in the text of {_rows(rows)} without {mark[1:-1]}s, and is taken as text"
            for mark, rows in self._literal.items()
        ]

    def repetitions(self) -> list[str]:
        """About rows that have the same prompt and the same media."""
        if not self._again:
            return []
        repeated = [number for rows in self._again.values() for number in rows[1:]]
        first = next(iter(self._again.values()))
        verb = "repeats" if len(repeated) == 1 else "repeat"
        example = f"e.g. row {first[1]} those of row {first[0]}"
        return [f"{_rows(sorted(repeated))} {verb} the prompt and the media of another, {example}"]


def _rows(numbers: list[int]) -> str:
    """ "3 rows (0, 5, 7)" """
    shown = ", ".join(map(str, numbers[:MAX_ROWS_NAMED])) + (", …" if len(numbers) > MAX_ROWS_NAMED else "")
    return f"{len(numbers)} row{'' if len(numbers) == 1 else 's'} ({shown})"
