"""What a demo's run reached, from eval.jsonl and metrics.jsonl, and whether it kept what the demo promises.

Prints nothing and draws nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollplex.demo.recipe import ACCURACY, EVAL_GREY, EVAL_HELD_OUT, Promise
from rollplex.demo.records import Row, number, read_rows

METRICS, EVALUATIONS = "metrics.jsonl", "eval.jsonl"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One evaluation."""

    step: int
    """Iterations before it."""
    accuracy: float
    count: int
    """Scans."""

    @property
    def num_right(self) -> int:
        """Scans that were named rightly."""
        return round(self.accuracy * self.count)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the run left; evaluations in the order in which they were made."""

    done: int
    """Iterations."""
    wanted: int
    held_out: tuple[Measured, ...]
    grey: tuple[Measured, ...]

    @property
    def is_complete(self) -> bool:
        """Whether every iteration was made, so that the demo's promises are due."""
        return self.done >= self.wanted


def read_result(run_dir: Path, *, wanted: int) -> Result:
    """The result of a run, as far as it got.

    Args:
        wanted: iterations of the whole run.

    Raises:
        DataError: a line of these files is not a JSON object, or an evaluation lacks a number.
    """
    evaluations = list(read_rows(run_dir / EVALUATIONS))
    return Result(
        done=sum("step" in row for row in read_rows(run_dir / METRICS)),
        wanted=wanted,
        held_out=tuple(_measured(row) for row in evaluations if row.get("name") == EVAL_HELD_OUT),
        grey=tuple(_measured(row) for row in evaluations if row.get("name") == EVAL_GREY),
    )


def keeps_held_out(result: Result, promise: Promise) -> bool:
    """Whether the last evaluation on scans that were not learned from is good enough."""
    return bool(result.held_out) and result.held_out[-1].accuracy >= promise.held_out


def keeps_grey(result: Result, promise: Promise) -> bool:
    """Whether accuracy stayed at chance where there is nothing to see."""
    return bool(result.grey) and result.grey[-1].accuracy < promise.grey


def _measured(row: Row) -> Measured:
    return Measured(
        step=int(number(row, "step", where=EVALUATIONS)),
        accuracy=number(row, ACCURACY, where=EVALUATIONS),
        count=int(number(row, "count", where=EVALUATIONS)),
    )
