"""What the model answered to each held-out scan, from the run's completions.jsonl, and which of them to show.

Knows the demo's own data and its reward `right`; nothing of pictures on a screen or on paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollplex.demo.recipe import RIGHT
from rollplex.demo.records import Row, number, read_rows
from rollplex.demo.rewards import named_digit
from rollplex.errors import DataError

COMPLETIONS: Final = "completions.jsonl"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One scan with the model's response to it."""

    row: int
    """In the evaluation's data."""
    picture: Path
    truth: str
    response: str
    is_right: bool

    @property
    def shown(self) -> str:
        """The digit that the response names; else the response itself, in quotes, in printable ASCII."""
        digit = named_digit(self.response)
        if digit is not None:
            return str(digit)
        return '"' + "".join(c if c.isascii() and c.isprintable() else "." for c in self.response) + '"'


def read_answers(run_dir: Path, data: Path, *, name: str, step: int) -> list[Answer]:
    """The answers of evaluation `name` after `step` iterations, by row; none if the run kept none.

    Args:
        run_dir: holds completions.jsonl.
        data: the evaluation's JSONL file; pictures are named relative to it.

    Raises:
        DataError: a line of these files is not what the run and the demo write.
    """
    file = run_dir / COMPLETIONS
    samples = [
        sample
        for sample in read_rows(file, having=f'"{name}"')
        if sample.get("source") == name and sample.get("step") == step
    ]
    if not samples:
        return []
    rows = list(read_rows(data))
    answers = [_answer(sample, rows, data, str(file)) for sample in samples]
    return sorted(answers, key=lambda answer: answer.row)


def choose(answers: Sequence[Answer], *, count: int, wrong: int) -> list[Answer]:
    """Which to show, by row, always the same ones: the first `wrong` mistakes, and right ones of every digit in turn.

    Where there are too few of the one, more of the other.
    """
    mistakes = [answer for answer in answers if not answer.is_right]
    right = _in_turn([answer for answer in answers if answer.is_right])
    num_right = min(len(right), max(count - wrong, count - len(mistakes)))
    return sorted(mistakes[: count - num_right] + right[:num_right], key=lambda answer: answer.row)


def _in_turn(answers: Sequence[Answer]) -> list[Answer]:
    """The first of every digit, then the second of every digit, and so on; by row within each turn."""
    seen: dict[str, int] = {}
    turns: list[tuple[int, int]] = []
    for place, answer in enumerate(answers):
        seen[answer.truth] = seen.get(answer.truth, 0) + 1
        turns.append((seen[answer.truth], place))
    return [answers[place] for _, place in sorted(turns)]


def _answer(sample: Row, rows: Sequence[Row], data: Path, where: str) -> Answer:
    index = int(number(sample, "row", where=where))
    rewards, response = sample.get("rewards"), sample.get("completion")
    if not 0 <= index < len(rows) or not isinstance(rewards, dict) or not isinstance(response, str):
        raise DataError(
            "A completion is not one of this demo",
            got=f"row {index} of {len(rows)}, completion {response!r}, rewards {rewards!r}"[:300],
            needed=f"a row of {data.name}, a text, and a number for each reward function",
            where=where,
        )
    images = rows[index].get("images")
    if not isinstance(images, list) or not images:
        raise DataError("A row of the demo's data names no image", got=repr(images), where=f"{data}, row {index}")
    return Answer(
        row=index,
        picture=data.parent / str(images[0]),
        truth=str(rows[index].get("answer")),
        response=response,
        is_right=number(rewards, RIGHT, where=where) == 1.0,
    )
