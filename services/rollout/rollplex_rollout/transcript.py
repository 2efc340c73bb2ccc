"""What a unit's rows have said so far: their tokens, where each stops, and which groups are finished.

Owns the stopping rule and the making of finished groups. Knows no model, no sampling rule and no tensor library.

A row stops after the token that is a stop id, or when it has reached its limit. With forced lengths the limit alone
counts. What a row draws after it has stopped is dropped here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollplex.errors import EngineError
from rollplex_rollout.engine import FinishedGroup, Unit


class Transcript:
    """The responses of one unit while they grow. Row = prompt index × group size + sample."""

    def __init__(self, unit: Unit) -> None:
        sampling = unit.sampling
        self._groups = tuple(slot.group for slot in unit.prompts)
        self._samples = sampling.group_size
        self._limits = unit.limits()
        self._stop_ids = np.asarray(sampling.stop_ids, dtype=np.int64)
        self._forced = bool(sampling.forced_lengths)
        shape = (unit.rows, int(self._limits.max()))
        self._tokens = np.zeros(shape, dtype=np.int32)
        self._logprobs = np.zeros(shape, dtype=np.float64)
        self._lengths = np.zeros(unit.rows, dtype=np.int64)
        self._alive = np.ones(unit.rows, dtype=np.bool_)
        self._stopped = np.zeros(unit.rows, dtype=np.bool_)
        self._open = np.ones(len(self._groups), dtype=np.bool_)
        self._position = 0

    @property
    def position(self) -> int:
        """Of the token that comes next, in every row that goes on."""
        return self._position

    @property
    def done(self) -> bool:
        """Every row has stopped."""
        return not self._open.any()

    def add(self, tokens: NDArray[np.int64], logprobs: NDArray[np.float64]) -> tuple[FinishedGroup, ...]:
        """Append one token per row; returns the groups that this token finished, in the order of the unit's prompts.

        Args:
            tokens, logprobs: [rows]; those of rows that have stopped are dropped.
        """
        if self.done:
            raise EngineError("A unit goes on after its last response has stopped", got=f"position {self._position}")
        self._tokens[:, self._position] = tokens
        self._logprobs[:, self._position] = logprobs
        self._position += 1
        is_stop = np.isin(tokens, self._stop_ids)
        at_limit = self._position >= self._limits
        ended = self._alive & (at_limit if self._forced else at_limit | is_stop)
        if not ended.any():
            return ()
        self._lengths[ended] = self._position
        self._stopped[ended] = is_stop[ended]
        self._alive &= ~ended
        finished = self._open & ~self._alive.reshape(-1, self._samples).any(axis=1)
        self._open &= ~finished
        return tuple(self._group(int(index)) for index in finished.nonzero()[0])

    def _group(self, index: int) -> FinishedGroup:
        rows = slice(index * self._samples, (index + 1) * self._samples)
        lengths = self._lengths[rows]
        kept = np.arange(self._position) < lengths[:, None]
        return FinishedGroup(
            group=self._groups[index],
            lengths=tuple(int(length) for length in lengths),
            tokens=self._tokens[rows, : self._position][kept],
            logprobs=self._logprobs[rows, : self._position][kept],
            stopped=tuple(bool(flag) for flag in self._stopped[rows]),
        )
