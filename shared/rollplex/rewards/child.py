"""The coordinator's reward child: decodes completions and has the user's functions score them.

The functions themselves run in processes of their own (`rollplex.rewards.runner`), each of which is killed when its
time is up and replaced when it is lost, while the others go on. Owns what the messages of `rollplex.protocol.reward`
do. Does not know what a failure means for the run: that is the coordinator's policy.
"""

from __future__ import annotations

import logging
import math
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias, assert_never

import msgspec

from rollplex.data.rows import Rows
from rollplex.data.tokenizer import TextTokenizer
from rollplex.errors import ConfigError, ProtocolError, StateError
from rollplex.protocol.common import Failed, Leave, Responses
from rollplex.protocol.inputs import DataSource
from rollplex.protocol.reward import (
    FromReward,
    GroupRewarded,
    OpenRewards,
    RewardFailed,
    RewardFunction,
    RewardGroup,
    RewardPart,
    RewardsOpened,
    ToReward,
)
from rollplex.rewards.pool import Outcome, Pool
from rollplex.rewards.process import FunctionProcess
from rollplex.rewards.validate import weighted_sum
from rollplex.rewards.wire import Broke, File, Function, Images, Returned, Score
from rollplex.worker.runtime import report

MAX_TEXT_CHARS = 65_536
OUTPUT_LIMIT_BYTES = 16 * 2**20
"""Of what the functions print over the whole run, so much reaches the log."""
log = logging.getLogger("rollplex.rewards")
Reply: TypeAlias = Callable[[FromReward], None]
Functions: TypeAlias = tuple[tuple[str, float], ...]
"""Name and weight of each, in their order."""


class RewardService:
    """Scores groups, as many at once as there are processes for it. Answers come from the pool's threads.

    Args:
        output: where what the functions print goes; the log of this process by default.
    """

    def __init__(self, output: Callable[[bytes], object] = lambda content: os.write(2, content)) -> None:
        self._output = output
        self._pool: Pool | None = None
        self._functions: Functions = ()
        self._sources: dict[str, DataSource] = {}
        self._rows: dict[str, Rows] = {}
        self._pictured: dict[str, Rows] = {}
        """The same rows with images that they hold themselves; only if a function wants them."""

    def handle(self, message: ToReward, reply: Reply) -> None:
        """Carry out one instruction; a group is answered later. A function that fails is an answer (RewardFailed).

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
                self._submit(message, reply)
            case Leave():
                self.close()
            case _:
                assert_never(message)

    def close(self) -> None:
        """End the processes of the functions."""
        if self._pool is not None:
            self._pool.close()

    def _open(self, message: OpenRewards) -> RewardsOpened:
        weights = [function.weight for function in message.functions]
        if not any(weights):
            raise ConfigError("No reward function has a weight", got=str(weights), needed="at least one that is not 0")
        names = names_of([function.spec for function in message.functions])
        self._functions = tuple(zip(names, weights, strict=True))
        self._tokenizer = TextTokenizer(Path(message.model_path))
        self._sources = {source.name: source for source in message.sources}
        self._rows = {source.name: Rows.of(source, binary=False) for source in message.sources}
        functions = tuple(_function(item) for item in message.functions)
        self._pool = Pool(
            lambda cancel_fd: FunctionProcess(
                functions,
                message.memory_limit_bytes,
                self._output,
                output_limit_bytes=OUTPUT_LIMIT_BYTES // message.workers,
                cancel_fd=cancel_fd,
            ),
            message.workers,
            message.time_limit_s,
        )
        ready = self._pool.start()
        if ready.images:
            self._pictured = {source.name: Rows.of(source) for source in message.sources}
        for sentence in ready.taken:
            log.info("%s", sentence)
        return RewardsOpened(
            cause=message.cause,
            names=names,
            fingerprints=ready.fingerprints,
            notes=ready.taken,
            required=ready.required,
        )

    def _submit(self, message: RewardGroup, reply: Reply) -> None:
        rows = self._rows.get(message.source)
        if self._pool is None or rows is None:
            raise StateError("No such dataset is open", got=message.source, needed=str(sorted(self._rows)))
        responses = message.responses
        texts = self._texts(responses)
        if len(message.stopped) != len(texts):
            raise ProtocolError(
                "A group's stops do not fit its responses",
                got=f"{len(message.stopped)} stops for {len(texts)} responses",
                needed="one for each",
                where=f"group {responses.group}",
            )
        request = Score(
            row=rows.for_rewards(message.row),
            texts=texts,
            lengths=responses.lengths,
            tokens=responses.tokens,
            stopped=message.stopped,
            step=message.step,
            source=message.source,
            images=self._row_images(message) if self._pictured else None,
        )
        self._pool.submit(_Group(message, request, self._functions, rows.where(message.row), reply))

    def _row_images(self, message: RewardGroup) -> Images:
        source = self._sources[message.source]
        places = self._pictured[message.source].row(message.row).images
        return Images(
            folder=source.image_dir,
            places=tuple(p if isinstance(p, str) else File(data=p.data, name=p.name) for p in places),
            max_pixels=source.max_image_pixels,
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


class _Group:
    """One group on its way through the pool: turns what comes back into the answer."""

    def __init__(
        self,
        message: RewardGroup,
        request: Score,
        functions: Functions,
        place: str,
        reply: Reply,
    ) -> None:
        self.request = request
        self._message = message
        self._functions = functions
        self._place = place
        self._reply = reply

    def done(self, outcome: Outcome, start_s: float, end_s: float) -> None:
        """Answer with rewards, or with the function that failed."""
        if isinstance(outcome, Broke):
            self._reply(self._failure(outcome))
        else:
            self._reply(self._rewarded(outcome, start_s, end_s))

    def failed(self, error: Exception) -> None:
        """Tell the coordinator that no function can be called any more."""
        log.error("no function can be called any more: %s", error, exc_info=error)
        self._reply(Failed(cause=self._message.cause, error=report(error)))

    def _rewarded(self, outcome: Sequence[Returned], start_s: float, end_s: float) -> GroupRewarded:
        values = [item.values for item in outcome]
        return GroupRewarded(
            cause=self._message.cause,
            step=self._message.step,
            group=self._message.responses.group,
            rewards=_blob(weighted_sum(values, [weight for _, weight in self._functions])),
            by_function=tuple(_blob(item) for item in values),
            parts=tuple(
                RewardPart(function=item.function, name=name, values=_blob(numbers))
                for item in outcome
                for name, numbers in item.parts.items()
            ),
            texts=tuple(text[:MAX_TEXT_CHARS] for text in self.request.texts),
            start_s=start_s,
            end_s=end_s,
        )

    def _failure(self, broke: Broke) -> RewardFailed:
        message, (name, _) = self._message, self._functions[broke.function]
        group = message.responses.group
        log.warning("step %d, group %d, %s: %s: %s", message.step, group, self._place, name, broke.detail)
        return RewardFailed(
            cause=message.cause,
            step=message.step,
            group=group,
            row=message.row,
            place=self._place[:MAX_TEXT_CHARS],
            function=name,
            problem=broke.problem,
            detail=broke.detail[:MAX_TEXT_CHARS],
        )


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


def _function(item: RewardFunction) -> Function:
    """As the runner is told it. Raises ProtocolError if the options are no JSON object."""
    try:
        options = msgspec.json.decode(item.options, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise ProtocolError("A function's options are no JSON object", got=str(error), where=item.spec) from error
    return Function(spec=item.spec, form=item.signature, options=options)


def _blob(values: Sequence[float | None]) -> bytes:
    """float64, little-endian; None becomes NaN."""
    return struct.pack(f"<{len(values)}d", *(math.nan if value is None else value for value in values))
