"""How far the rollout's log-probabilities are from the trainer's, row by row, from what a run wrote down; and how much
of that the model's precision alone costs. Pure but for reading completions.jsonl (`run.log_tokens`).

Two computations in bfloat16 differ by what both round. A second run, in float32, that replays the responses of the
first, tells one from the other: what the rollout is away from it no trainer can make good, but by rounding exactly as
the rollout does.
"""

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
FILE: Final = "completions.jsonl"
"""Of a run directory."""
_TRAIN: Final = "train"


class Spoken(Struct, frozen=True, kw_only=True):
    """What is needed of a line."""

    source: str
    step: int
    row: int
    sample: int = 0
    ids: tuple[int, ...] = ()
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


class Rounding(Struct, frozen=True, kw_only=True):
    """Means over all tokens that both runs have."""

    tokens: int
    gap: float
    """|rollout - trainer|."""
    rollout: float
    """|rollout - float32|: the gap to a trainer that rounds nothing."""
    trainer: float
    """|trainer - float32|."""


def read_rounding(run_dir: Path, exact_dir: Path) -> Rounding:
    """What of a run's gap is rounding.

    Args:
        exact_dir: of a run with `model.dtype: float32` that replayed the responses with the same weights (from a model
            folder in bfloat16: the rounding of weights that are not is counted too).

    Raises:
        DataError: a run wrote down no tokens, or they have no response in common.
    """
    exact = {_place(one): one for one in _trained(exact_dir)}
    pairs = [(one, exact[_place(one)]) for one in _trained(run_dir) if _place(one) in exact]
    pairs = [(one, other) for one, other in pairs if one.ids == other.ids]
    if not pairs:
        raise DataError(
            "The two runs have no response in common",
            needed="the same tokens at the same step, row and sample",
            do=f"Replay: --set rollout.engine=replay --set rollout.replay={run_dir / FILE} --set model.dtype=float32.",
            where=str(exact_dir / FILE),
        )
    triples = [
        three
        for one, other in pairs
        for three in zip(one.logprobs, one.trainer_logprobs, other.trainer_logprobs, strict=True)
    ]
    return Rounding(
        tokens=len(triples),
        gap=_mean(abs(rollout - trainer) for rollout, trainer, _ in triples),
        rollout=_mean(abs(rollout - wide) for rollout, _, wide in triples),
        trainer=_mean(abs(trainer - wide) for _, trainer, wide in triples),
    )


def read_gaps(run_dir: Path) -> Gaps:
    """The gaps of a run.

    Raises:
        DataError: it wrote down no tokens of training, or a line is not a response.
    """
    spoken = _trained(run_dir)
    return Gaps(rows=_gaps(spoken, lambda one: one.row), steps=_gaps(spoken, lambda one: one.step))


def tables(gaps: Gaps) -> tuple[Table, Table]:
    """By row, and by iteration."""
    return _table("row", gaps.rows), _table("iteration", gaps.steps)


def _place(one: Spoken) -> tuple[int, int, int]:
    return one.step, one.row, one.sample


def _mean(values: Iterable[float]) -> float:
    found = tuple(values)
    return math.fsum(found) / len(found)


def _trained(run_dir: Path) -> list[Spoken]:
    """Responses of training that have their log-probabilities; at least one."""
    file = run_dir / FILE
    spoken = [one for one in _lines(file) if one.source == _TRAIN and one.trainer_logprobs]
    if not spoken:
        raise DataError(
            "The run wrote down no log-probabilities",
            needed="responses of training with their tokens",
            do="Run with run.log_tokens: true, and run.log_completions: as many groups as are to be compared.",
            where=str(file),
        )
    return spoken


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
