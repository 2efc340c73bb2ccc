"""Rewards and durations of the last iterations, from the rows of metrics.jsonl. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from rollplex.terminal.view import Timing

KEPT = 50
"""Iterations that medians are over."""
PHASES = ("rollout", "score", "train", "update")


class Pace:
    """Adding an iteration costs next to nothing; what is asked for is computed then."""

    def __init__(self) -> None:
        self._rows: deque[Mapping[str, object]] = deque(maxlen=KEPT)

    def add(self, metrics: Mapping[str, object]) -> None:
        """One iteration is over. `metrics`: its row, or its metrics as the journal and the API have them."""
        self._rows.append(metrics)

    @property
    def reward(self) -> float | None:
        """Of the last iteration."""
        return self._last("reward")

    @property
    def hidden(self) -> float | None:
        """The share of the last iteration's prefix time that lay inside the rollout."""
        return self._last("time/prefix_in_window")

    @property
    def timings(self) -> tuple[Timing, ...]:
        """Seconds of an iteration and of each of its phases; those that are known."""
        found = (self._timing(name, key) for name, key in (("iteration", "step"), *zip(PHASES, PHASES, strict=True)))
        return tuple(timing for timing in found if timing is not None)

    def left_s(self, iterations: int) -> float | None:
        """How long so many more will take, evaluations and checkpoints not counted; None before the first."""
        timing = self._timing("iteration", "step")
        return None if timing is None or iterations <= 0 else iterations * timing.median_s

    def _last(self, key: str) -> float | None:
        return _number(self._rows[-1].get(key)) if self._rows else None

    def _timing(self, name: str, key: str) -> Timing | None:
        values = [value for row in self._rows if (value := _number(row.get(f"time/{key}_s"))) is not None]
        return Timing(name=name, last_s=values[-1], median_s=statistics.median(values)) if values else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
