"""How far the rollout's log-probabilities are from the trainer's, row by row, from what a run wrote down. Pure but for
reading completions.jsonl (`run.log_tokens`)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from rollplex.bench.tables import Table
from rollplex.errors import DataError

LIMIT: Final = 0.02
"""Of the mean of a row, in bfloat16."""
_TRAIN: Final = "train"


class Spoken(Struct, frozen=True, kw_only=True):
    """What is needed of a line."""

    source: str
    step: int
    row: int
    logprobs: tuple[float, ...] = ()
    trainer_logprobs: tuple[float, ...] = ()


class Gap(Struct, frozen=True, kw_only=True):
    """|rollout - trainer| over the tokens of a row, or of an iteration."""

    number: int
    """Of the row, or the iteration."""
    tokens: int
    mean: float
    largest: float


class Gaps(Struct, frozen=True, kw_only=True):
    """Of one run."""

    rows: tuple[Gap, ...]
    steps: tuple[Gap, ...]

    @property
    def worst(self) -> float:
        """The greatest mean of a row."""
        return max(gap.mean for gap in self.rows)

    @property
    def within(self) -> bool:
        """Whether every row's mean is below `LIMIT`; NaN is not."""
        return self.worst < LIMIT

    @property
    def slope(self) -> float:
        """By how much the mean grows an iteration: the line of least squares through the iterations' means."""
        middle = math.fsum(gap.number for gap in self.steps) / len(self.steps)
        spread = math.fsum((gap.number - middle) ** 2 for gap in self.steps)
        return math.fsum((gap.number - middle) * gap.mean for gap in self.steps) / spread if spread else 0.0


def read_gaps(run_dir: Path) -> Gaps:
    """The gaps of a run.

    Raises:
        DataError: it wrote down no tokens of training, or a line is not a response.
    """
    file = run_dir / "completions.jsonl"
    spoken = [one for one in _lines(file) if one.source == _TRAIN and one.trainer_logprobs]
    if not spoken:
        raise DataError(
            "The run wrote down no log-probabilities",
            needed="responses of training with their tokens",
            do="Run with run.log_tokens: true, and run.log_completions: as many groups as are to be compared.",
            where=str(file),
        )
    return Gaps(rows=_gaps(spoken, lambda one: one.row), steps=_gaps(spoken, lambda one: one.step))


def tables(gaps: Gaps) -> tuple[Table, Table]:
    """By row, and by iteration."""
    return _table("row", gaps.rows), _table("iteration", gaps.steps)


def _gaps(spoken: Iterable[Spoken], number: Callable[[Spoken], int]) -> tuple[Gap, ...]:
    differences: dict[int, list[float]] = defaultdict(list)
    for one in spoken:
        pairs = zip(one.logprobs, one.trainer_logprobs, strict=True)
        differences[number(one)] += [abs(rollout - trainer) for rollout, trainer in pairs]
    return tuple(
        Gap(number=key, tokens=len(found), mean=math.fsum(found) / len(found), largest=max(found))
        for key, found in sorted(differences.items())
    )


def _lines(file: Path) -> Iterator[Spoken]:
    decoder = msgspec.json.Decoder(Spoken)
    try:
        with file.open("rb") as lines:
            for line in lines:
                yield decoder.decode(line)
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError("The responses of a run cannot be read", got=str(error), where=str(file)) from error


def _table(what: str, gaps: Iterable[Gap]) -> Table:
    rows = tuple((str(gap.number), str(gap.tokens), f"{gap.mean:.5f}", f"{gap.largest:.5f}") for gap in gaps)
    return Table(head=(what, "tokens", "mean gap", "largest gap"), rows=rows)
