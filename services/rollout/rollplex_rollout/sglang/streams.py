"""One unit's requests in flight.

Owns: the order in which they are sent, what becomes of their chunks, and when a group is finished. Runs in SGLang's
event loop; knows no SGLang, only streams of chunks. `Inbox` is what the thread that called `generate` waits on.

Of each prompt one response is asked for first, and the others when its first token is here: by then the prompt's keys
and values are in SGLang's radix tree, so that a prompt is prefilled, and its pictures are encoded, once. Prompts are
sent in their order; a thread beside reads the pictures of each while SGLang works on those before.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from rollplex.errors import EngineError
from rollplex_rollout.engine import FinishedGroup, diverged
from rollplex_rollout.sglang.requests import Pictures, Request

Chunk: TypeAlias = dict[str, Any]
"""As SGLang's `async_generate(stream=True)` gives it: new ids, and their log-probabilities in meta_info."""
Stream: TypeAlias = Callable[[Request, Pictures | None], AsyncIterator[Chunk]]

log = logging.getLogger("rollplex.rollout.sglang")

ROUNDING: Final = 1e-4
"""The logarithm of a float32 softmax of 1 can be above 0 by less than this."""


@dataclass(frozen=True)
class Prefilled:
    """Every prompt has its first token."""


@dataclass(frozen=True)
class Finished:
    """A group is whole."""

    index: int
    """Of its prompt in the unit."""
    group: FinishedGroup


@dataclass(frozen=True)
class Done:
    """Every group is whole, or something went wrong."""

    error: BaseException | None


class Inbox:
    """What the unit's requests bring forth, for another thread."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Prefilled | Finished | Done] = queue.SimpleQueue()
        self.last_chunk_s = time.monotonic()
        """When anything came last."""
        self.prefill_end_s = self.last_chunk_s
        """When the last prompt's first token came."""
        self.longest = 0
        """Tokens of the longest response so far."""
        self.open: set[str] = set()
        """The requests that are under way."""
        self.ended = threading.Event()
        """Nothing is sent any more."""

    def end(self, error: BaseException | None) -> None:
        """The last event."""
        self.events.put(Done(error))
        self.ended.set()

    def await_end(self, deadline_s: float) -> None:
        """Wait until nothing is sent any more, as long as that may take."""
        if not self.ended.wait(deadline_s):
            log.warning("requests of SGLang's were still being made after %g s", deadline_s)


@dataclass
class _Response:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Streams:
    """Sends one unit's requests and gathers their chunks."""

    def __init__(
        self,
        *,
        groups: Sequence[int],
        requests: Sequence[Sequence[Request]],
        stop_ids: Sequence[int],
        forced: bool,
        stream: Stream,
        inbox: Inbox,
        reader: Executor,
    ) -> None:
        """Sends nothing yet.

        Args:
            groups: the number of each prompt's group.
            requests: by prompt, then sample.
            stop_ids: end a response, unless lengths are forced.
            forced: every response has exactly its limit.
            reader: of one thread, which reads pictures; whoever made it ends it.
        """
        self._groups = groups
        self._requests = requests
        self._waiting = len(requests)
        self._stop_ids = frozenset(stop_ids)
        self._forced = forced
        self._stream = stream
        self._inbox = inbox
        self._reader = reader

    async def run(self) -> None:
        """All of it; the last event is `Done`. Cancelled: nothing is left running here (SGLang must be told)."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(len(self._requests)):
                    tasks.create_task(self._group(index))
        except BaseExceptionGroup as error:
            self._inbox.end(_first(error))
        except asyncio.CancelledError:
            self._inbox.end(None)
            raise
        else:
            self._inbox.end(None)

    async def _group(self, index: int) -> None:
        requests = self._requests[index]
        started = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._sample(requests[0], started))]
            await started.wait()
            self._inbox.prefill_end_s = time.monotonic()
            self._waiting -= 1
            if not self._waiting:
                self._inbox.events.put(Prefilled())
            running += [tasks.create_task(self._sample(request)) for request in requests[1:]]
        self._inbox.events.put(Finished(index, self._finished(index, [task.result() for task in running])))

    async def _sample(self, request: Request, started: asyncio.Event | None = None) -> _Response:
        response = _Response()
        pictures = await self._pictures(request) if started else None
        self._inbox.open.add(request.rid)
        reason: Any = None
        async for chunk in self._stream(request, pictures):
            reason = self._take(request, response, chunk)
            if started is not None:
                started.set()
        self._check(request, response, reason)
        self._inbox.open.discard(request.rid)
        return response

    async def _pictures(self, request: Request) -> Pictures | None:
        """Of a prompt's first request. Those without pictures wait their turn too."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, request.pictures or _none)

    def _take(self, request: Request, response: _Response, chunk: Chunk) -> Any:
        """Add a chunk; returns why the request has ended, or None."""
        meta = chunk["meta_info"]
        entries = meta.get("output_token_logprobs") or []
        tokens = [int(token) for token in chunk["output_ids"]]
        if [int(entry[1]) for entry in entries] != tokens:
            raise EngineError(
                "SGLang gave log-probabilities of other ids than it sampled",
                got=f"{[int(entry[1]) for entry in entries]}",
                needed=f"{tokens}",
                where=request.rid,
            )
        response.tokens += tokens
        response.logprobs += [float(entry[0]) for entry in entries]
        self._inbox.longest = max(self._inbox.longest, len(response.tokens))
        self._inbox.last_chunk_s = time.monotonic()
        return meta.get("finish_reason")

    def _check(self, request: Request, response: _Response, reason: Any) -> None:
        """Whether this is what was asked for: SGLang shortens what does not fit, and aborts, without an error."""
        kind = reason.get("type") if isinstance(reason, dict) else None
        length = len(response.tokens)
        stopped = kind == "stop" and not self._forced and bool(length) and response.tokens[-1] in self._stop_ids
        if not (stopped or (kind == "length" and length == request.limit)):
            raise EngineError(
                "SGLang ended a response for another reason than a stop id or its length",
                got=f"{reason} after {length} tokens",
                needed=f"{request.limit} tokens" + ("" if self._forced else f", or an id of {sorted(self._stop_ids)}"),
                where=request.rid,
            )
        wrong = [value for value in response.logprobs if not (math.isfinite(value) and value <= ROUNDING)]
        if wrong:
            raise diverged(f"log-probability {wrong[0]}", request.rid)

    def _finished(self, index: int, responses: Sequence[_Response]) -> FinishedGroup:
        return FinishedGroup(
            group=self._groups[index],
            lengths=tuple(len(response.tokens) for response in responses),
            tokens=np.asarray([token for response in responses for token in response.tokens], dtype=np.int32),
            logprobs=np.asarray([value for response in responses for value in response.logprobs], dtype=np.float64),
            stopped=tuple(response.tokens[-1] in self._stop_ids for response in responses),
        )


def _none() -> None:
    return None


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
