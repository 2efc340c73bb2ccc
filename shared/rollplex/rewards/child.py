"""The coordinator's reward child: decodes completions and has the user's functions score them.

The functions themselves run in a process of their own (`rollplex.rewards.runner`), which is killed when its time is up
and replaced when it is lost. Owns what the messages of `rollplex.protocol.reward` do. Does not know what a failure
means for the run: that is the coordinator's policy.
"""

from __future__ import annotations

import logging
import math
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import assert_never

from rollplex.data.rows import Rows
from rollplex.data.tokenizer import TextTokenizer
from rollplex.errors import ConfigError, ProtocolError, StateError
from rollplex.protocol.common import Leave, Responses
from rollplex.protocol.reward import (
    FromReward,
    GroupRewarded,
    OpenRewards,
    RewardFailed,
    RewardGroup,
    RewardProblem,
    RewardsOpened,
    ToReward,
)
from rollplex.rewards.process import FunctionProcess
from rollplex.rewards.validate import weighted_sum
from rollplex.rewards.wire import Score

MAX_TEXT_CHARS = 65_536
log = logging.getLogger("rollplex.rewards")


class RewardService:
    """Scores groups, one after the other.

    Args:
        output: where what the functions print goes; the log of this process by default.
    """

    def __init__(self, output: Callable[[bytes], object] = lambda content: os.write(2, content)) -> None:
        self._output = output
        self._opened: OpenRewards | None = None
        self._names: tuple[str, ...] = ()
        self._rows: dict[str, Rows] = {}
        self._replaced = False

    def handle(self, message: ToReward, reply: Callable[[FromReward], None]) -> None:
        """Carry out one instruction and answer it. A function that fails is an answer (RewardFailed), not an error.

        After a time-out the child answers nothing more: a new one takes its place.

        Raises:
            ConfigError: no function has a weight.
            RewardError: a function that cannot be imported.
            ModelError, DataError: a tokenizer or a dataset that cannot be read.
            StateError, ProtocolError: an instruction out of order, or with the wrong number of tokens.
        """
        match message:
            case OpenRewards():
                reply(self._open(message))
            case RewardGroup():
                if not self._replaced:
                    reply(self._score(message))
            case Leave():
                self.close()
            case _:
                assert_never(message)

    def close(self) -> None:
        """End the process of the functions."""
        if self._opened is not None:
            self._process.end()

    def _open(self, message: OpenRewards) -> RewardsOpened:
        if not any(function.weight for function in message.functions):
            raise ConfigError(
                "No reward function has a weight",
                got=str([function.weight for function in message.functions]),
                needed="at least one that is not 0",
            )
        self._names = names_of([function.spec for function in message.functions])
        self._tokenizer = TextTokenizer(Path(message.model_path))
        self._rows = {source.name: Rows(Path(source.path)) for source in message.sources}
        specs = [function.spec for function in message.functions]
        self._process = FunctionProcess(specs, message.memory_limit_bytes, self._output)
        self._process.start()
        self._opened = message
        return RewardsOpened(cause=message.cause, names=self._names)

    def _score(self, message: RewardGroup) -> GroupRewarded | RewardFailed:
        rows = self._rows.get(message.source)
        if self._opened is None or rows is None:
            raise StateError("No such dataset is open", got=message.source, needed=str(sorted(self._rows)))
        texts = self._texts(message.responses)
        request = Score(
            row=rows.line(message.row),
            texts=texts,
            lengths=message.responses.lengths,
            tokens=message.responses.tokens,
        )
        start_s = time.monotonic()
        outcome = self._process.score(request, self._opened.time_limit_s)
        group, step = message.responses.group, message.step
        if not isinstance(outcome, list):
            name = self._names[outcome.function]
            place = rows.where(message.row)
            log.warning("step %d, group %d, %s: %s: %s", step, group, place, name, outcome.detail)
            self._replaced = outcome.problem is RewardProblem.TIMED_OUT
            return RewardFailed(
                cause=message.cause,
                step=step,
                group=group,
                row=message.row,
                place=place[:MAX_TEXT_CHARS],
                function=name,
                problem=outcome.problem,
                detail=outcome.detail[:MAX_TEXT_CHARS],
            )
        return GroupRewarded(
            cause=message.cause,
            step=step,
            group=group,
            rewards=_blob(weighted_sum(outcome, [function.weight for function in self._opened.functions])),
            by_function=tuple(_blob(values) for values in outcome),
            texts=tuple(text[:MAX_TEXT_CHARS] for text in texts),
            start_s=start_s,
            end_s=time.monotonic(),
        )

    def _texts(self, responses: Responses) -> tuple[str, ...]:
        if 4 * sum(responses.lengths) != len(responses.tokens) or not responses.lengths:
            raise ProtocolError(
                "A group's tokens do not fit their lengths",
                got=f"{len(responses.tokens)} bytes for lengths {list(responses.lengths)[:20]}",
                needed="4 bytes a token, at least one response",
                where=f"group {responses.group}",
            )
        texts: list[str] = []
        at = 0
        for length in responses.lengths:
            ids = struct.unpack_from(f"<{length}i", responses.tokens, at)
            texts.append(self._tokenizer.decode(ids))
            at += 4 * length
        return tuple(texts)


def names_of(specs: Sequence[str]) -> tuple[str, ...]:
    """Short names for the functions, all different: what stands behind the colon, numbered where it repeats."""
    names: list[str] = []
    for spec in specs:
        name = base = spec.rpartition(":")[2]
        number = 1
        while name in names:
            number += 1
            name = f"{base}#{number}"
        names.append(name)
    return tuple(names)


def _blob(values: Sequence[float | None]) -> bytes:
    """float64, little-endian; None becomes NaN."""
    return struct.pack(f"<{len(values)}d", *(math.nan if value is None else value for value in values))
