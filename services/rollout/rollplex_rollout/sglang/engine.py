"""The engine for GPUs: SGLang, sampling from the mapped weights themselves (or, for comparison, from copies of them).

Owns: the contract (`rollplex_rollout.engine`) over SGLang: a unit's turn, deadlines, what is given back when. Knows
SGLang only as a `Runtime`.

What differs from the contract's general rules, because SGLang schedules by itself: which rows are computed together
depends on time, so that two runs of a unit differ in bits, and in tokens where those decide; draws come from torch's
generator in the scheduler process, seeded per unit.

    between units   no request runs, no keys and values, no encoded pictures are kept; on a GPU the pool's memory is
                    given back
    a unit          lend the inputs ▸ take the pool ▸ seed ▸ send, announce ▸ rest ▸ give the pool back

Of an engine of several ranks this is rank 0, which leads: SGLang passes its calls and requests on to the others' own
scheduler processes, and what comes of them is passed on to `following` by a line (`ranks`).
"""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

from rollplex.errors import EngineError, RollplexError
from rollplex.memory.segment import Mapping
from rollplex.protocol.common import Memory
from rollplex_rollout.engine import Announce, Setup, Unit, UnitReport, nobody
from rollplex_rollout.philox import draw_key
from rollplex_rollout.sglang import ranks
from rollplex_rollout.sglang.hooks import BEGIN, REST, TOGETHER
from rollplex_rollout.sglang.rank import Rank, Remote
from rollplex_rollout.sglang.requests import Pictures, Request, Requests
from rollplex_rollout.sglang.streams import Chunk, Done, Finished, Inbox, Prefilled, Streams

STALL_S: Final = 240.0
"""Without a token of any request for so long, the unit is given up. The first units compile kernels."""
LEAVING_S: Final = 2.0
"""How long the unit's tasks may take to end when they are told to."""
_LOOK_EVERY_S: Final = 0.5
_SEED_MASK: Final = 2**63 - 1

log = logging.getLogger("rollplex.rollout.sglang")


class Runtime(Protocol):
    """What the engine needs of `rollplex_rollout.sglang.runtime.SglangRuntime`."""

    def require_alive(self) -> None: ...

    def submit(self, work: Coroutine[Any, Any, None]) -> concurrent.futures.Future[None]: ...

    def stream(self, request: Request, pictures: Pictures | None) -> AsyncIterator[Chunk]: ...

    def abort_all(self) -> None: ...

    def rpc(self, method: str, **parameters: bool | float | str) -> None: ...

    def release_kv(self) -> None: ...

    def resume_kv(self) -> None: ...

    def close(self) -> None: ...


class SglangEngine(Rank):
    """Samples from the mapped weights themselves (`rollplex_rollout.engine.Engine`)."""

    def __init__(
        self, setup: Setup, runtime: Runtime, remote: Remote, actor: Mapping, line: ranks.Line | None = None
    ) -> None:
        """An engine that is up, with its pool of keys and values taken; gives it back.

        Args:
            actor: the weights segment as it can be read through `remote`.
            line: to the engine's other ranks. None: there are none.
        """
        super().__init__(setup, remote, actor)
        self._runtime = runtime
        self._line = line or ranks.Alone()
        self._requests = Requests(setup.shape, context_tokens=self.room)
        self._units = 0
        self._rest()
        self._line.tell(ranks.Up())

    def generate(self, unit: Unit, announce: Announce, prefilled: Callable[[], None] = nobody) -> UnitReport:
        """Sample a unit; after an error the engine may be of no use any more, and one of several ranks is of none."""
        with self._line.failing():
            return self._generate(unit, announce, prefilled)

    def _generate(self, unit: Unit, announce: Announce, prefilled: Callable[[], None]) -> UnitReport:
        unit.check()
        self._runtime.require_alive()
        start_s = time.monotonic()
        self._units += 1
        requests = self._requests.make(unit, f"u{unit.step:08d}-{self._units:08d}")
        kv_bytes = self.kv_bytes(unit)
        self._line.tell(ranks.begun(unit))
        inbox = Inbox()
        try:
            self.lend_inputs(unit)
            if self._on_gpu:
                self._runtime.resume_kv()
            self._runtime.rpc(BEGIN, seed=unit_seed(unit))
            self._sample(unit, requests, inbox, announce, prefilled)
        except BaseException as error:
            self._give_up(error)
            raise
        self._rest()
        over = ranks.Over(
            prefill_end_s=inbox.prefill_end_s,
            decode_steps=inbox.longest - 1,
            vision_prompts=sum(1 for slot in unit.prompts if slot.media),
        )
        self._line.tell(over)
        return ranks.report(over, start_s, kv_bytes)

    def drop_caches(self) -> None:
        """Nothing is kept between units; asked for again, so that it is certain. An engine with weights of its own
        copies the new ones here."""
        with self._line.failing():
            self._runtime.rpc(REST)
            self.renew()
            self._line.tell(ranks.Dropped())

    def close(self) -> None:
        super().close()
        self._runtime.close()

    def _sample(
        self,
        unit: Unit,
        requests: list[list[Request]],
        inbox: Inbox,
        announce: Announce,
        prefilled: Callable[[], None],
    ) -> None:
        sampling = unit.sampling
        reader = ThreadPoolExecutor(1, "pictures")
        streams = Streams(
            groups=[slot.group for slot in unit.prompts],
            requests=requests,
            stop_ids=sampling.stop_ids,
            forced=bool(sampling.forced_lengths),
            stream=self._runtime.stream,
            inbox=inbox,
            reader=reader,
        )
        running = self._runtime.submit(streams.run())
        try:
            while True:
                events = self._next(inbox)
                all_begun = any(isinstance(event, Prefilled) for event in events)
                ends = sorted((event for event in events if isinstance(event, Finished)), key=lambda end: end.index)
                groups = [end.group for end in ends]
                self._line.tell(*[ranks.Prefilled()] * all_begun, *map(ranks.sampled, groups))
                if all_begun:
                    prefilled()
                for group in groups:
                    announce(group)
                done = next((event for event in events if isinstance(event, Done)), None)
                if done is not None:
                    if done.error is not None:
                        raise _named(done.error)
                    return
        finally:
            running.cancel()
            reader.shutdown(cancel_futures=True)  # waits for the picture that it reads: its segment is unmapped next
            inbox.await_end(LEAVING_S)  # after that nothing is sent any more

    def _next(self, inbox: Inbox) -> list[Prefilled | Finished | Done]:
        """What has happened since the last call; nothing, where that was a while ago."""
        try:
            events = [inbox.events.get(timeout=_LOOK_EVERY_S)]
        except queue.Empty:
            self._runtime.require_alive()
            self._require_progress(inbox)
            return []
        while not inbox.events.empty():
            events.append(inbox.events.get())
        return events

    def _require_progress(self, inbox: Inbox) -> None:
        silent_s = time.monotonic() - inbox.last_chunk_s
        if silent_s > STALL_S:
            waiting = sorted(inbox.open)
            raise EngineError(
                "SGLang has brought forth no token for too long",
                got=f"{silent_s:.0f} s, {len(waiting)} requests under way",
                needed=f"a token within {STALL_S:.0f} s",
                where=f"request {waiting[0]}" if waiting else "",
            )

    def _give_up(self, error: BaseException) -> None:
        """End what runs, and give the unit's K/V back. The first error is the one that is told. With a rank gone the
        others' work waits for it on the GPU, and ends with the process."""
        if self._line.over:
            return
        try:
            self._runtime.require_alive()
            self._runtime.abort_all()
            self._rest()
        except RollplexError as second:
            log.exception("SGLang could not be brought to rest")
            error.add_note(f"and SGLang could not be brought to rest: {second}")

    def _rest(self) -> None:
        self._runtime.rpc(REST)
        if self._on_gpu:
            self._runtime.release_kv()
            if self._setup.parallel.rollout > 1:
                self._runtime.rpc(TOGETHER)  # SGLang has answered for rank 0

    @property
    def _on_gpu(self) -> bool:
        return self._setup.spec.device is Memory.CUDA


def unit_seed(unit: Unit) -> int:
    """Of torch's generator: another for every step, purpose and first prompt, the same when a unit is sampled again."""
    sampling = unit.sampling
    first, second = draw_key(seed=sampling.seed, purpose=sampling.purpose, step=unit.step)
    return ((first << 32 | second) ^ unit.prompts[0].row) & _SEED_MASK


def _named(error: BaseException) -> BaseException:
    """Errors of ours as they are; what SGLang raises, as an EngineError."""
    if isinstance(error, RollplexError):
        return error
    named = EngineError("SGLang refused a request", got=f"{type(error).__name__}: {error}")
    named.__cause__ = error
    return named
