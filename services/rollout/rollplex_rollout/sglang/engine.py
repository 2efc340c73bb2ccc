"""The engine for GPUs: SGLang, sampling from the mapped weights themselves (or, for comparison, from copies of them).

Owns: the contract (`rollplex_rollout.engine`) over SGLang: a unit's turn, deadlines, what is given back when. Knows
SGLang only as a `Runtime`.

What differs from the contract's general rules, because SGLang schedules by itself: which rows are computed together
depends on time, so that two runs of a unit differ in bits, and in tokens where those decide; draws come from torch's
generator in the scheduler process, seeded per unit.

    between units   no request runs, no keys and values, no encoded pictures are kept; on a GPU the pool's memory is
                    given back
    a unit          take the pool ▸ seed ▸ send, announce ▸ rest ▸ give the pool back
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import queue
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, Protocol, Self

from rollplex.errors import EngineError, RollplexError
from rollplex.memory.predict import pool_kv_bytes
from rollplex.memory.segment import Mapping
from rollplex.protocol.common import Memory
from rollplex_rollout.engine import Announce, Setup, Unit, UnitReport, nobody
from rollplex_rollout.philox import draw_key
from rollplex_rollout.sglang import wire
from rollplex_rollout.sglang.arguments import (
    FORCED_ENVIRONMENT,
    SPARE_TOKENS,
    allocator_bytes,
    environment,
    server_arguments,
)
from rollplex_rollout.sglang.hooks import BEGIN, REST
from rollplex_rollout.sglang.places import places
from rollplex_rollout.sglang.remote import RemoteMapping
from rollplex_rollout.sglang.requests import Request, Requests
from rollplex_rollout.sglang.streams import Chunk, Done, Finished, Inbox, Prefilled, Streams

STALL_S: Final = 240.0
"""Without a token of any request for so long, the unit is given up. The first units compile kernels."""
OWN_WEIGHTS_GB: Final = 0.05
"""What SGLang counts as weights of its own if it has none: buffers."""
_LOOK_EVERY_S: Final = 0.5
_SEED_MASK: Final = 2**63 - 1

log = logging.getLogger("rollplex.rollout.sglang")


class Runtime(Protocol):
    """What the engine needs of `rollplex_rollout.sglang.runtime.SglangRuntime`."""

    def require_alive(self) -> None: ...

    def submit(self, work: Coroutine[Any, Any, None]) -> concurrent.futures.Future[None]: ...

    def stream(self, request: Request) -> AsyncIterator[Chunk]: ...

    def abort_all(self) -> None: ...

    def rpc(self, method: str, **parameters: bool | float | str) -> None: ...

    def release_kv(self) -> None: ...

    def resume_kv(self) -> None: ...

    def close(self) -> None: ...


class Remote(Protocol):
    """What the engine needs of `rollplex_rollout.sglang.remote.RemoteWeights`."""

    def digest(self) -> str: ...

    def look(self) -> None: ...

    def copy(self) -> None: ...

    def close(self) -> None: ...


class SglangEngine:
    """Samples from the mapped weights themselves (`rollplex_rollout.engine.Engine`)."""

    def __init__(self, setup: Setup, runtime: Runtime, remote: Remote, actor: Mapping) -> None:
        """An engine that is up, with its pool of keys and values taken; gives it back.

        Args:
            actor: the weights segment as it can be read through `remote`.
        """
        self._setup = setup
        self._runtime = runtime
        self._remote = remote
        self._actor = actor
        self._requests = Requests(setup.shape, dtype=setup.spec.dtype, context_tokens=self._room)
        self._units = 0
        self._rest()

    @classmethod
    def start(cls, setup: Setup) -> Self:
        """Start SGLang over the segment; returns when it can sample.

        Raises:
            EngineError: SGLang is not installed, did not start, or is not what was asked for.
            ModelError: its model has other parameters than the segment.
            SegmentError: the segment cannot be mapped.
        """
        arguments = server_arguments(setup)
        os.environ.update(FORCED_ENVIRONMENT)
        for name, value in environment(setup.spec.device).items():
            os.environ.setdefault(name, value)
        from rollplex_rollout.sglang.runtime import LOAD_DEADLINE_S, SglangRuntime, make_folder  # noqa: PLC0415

        runtime = SglangRuntime(make_folder(setup.run_dir))
        try:
            remote, offsets = runtime.start(
                arguments,
                lambda link: link.offer(_offer(setup), setup.weights.descriptor(), LOAD_DEADLINE_S),
            )
            require_offsets(setup, offsets)
            require_sizes(setup, runtime.info())
            ref = setup.weights.ref
            return cls(setup, runtime, remote, RemoteMapping(remote, ref.size_bytes, ref.memory))
        except BaseException:
            runtime.close()
            raise

    @property
    def on_policy(self) -> bool:
        return True

    @property
    def actor(self) -> Mapping:
        return self._actor

    def digest(self) -> str:
        return self._remote.digest()

    def check_mapped(self) -> None:
        self._remote.look()

    def kv_bytes(self, unit: Unit) -> int:
        """The pool, whatever the unit: SGLang takes all of it at once.

        Raises:
            EngineError: a prompt of the unit does not fit with its response.
        """
        longest = max(slot.tokens for slot in unit.prompts) + unit.longest
        if longest > self._room:
            raise EngineError(
                "SGLang's pool of keys and values does not hold a prompt with its response",
                got=f"{longest} tokens",
                needed=f"at most {self._room}",
                do="Raise rollout.sglang.kv_tokens, or lower rollout.max_new_tokens.",
            )
        spec = self._setup
        return pool_kv_bytes(spec.shape, kv_tokens=spec.engine.kv_tokens, dtype=spec.spec.dtype)

    def generate(self, unit: Unit, announce: Announce, prefilled: Callable[[], None] = nobody) -> UnitReport:
        """Sample a unit; after an error the engine may be of no use any more."""
        unit.check()
        self._runtime.require_alive()
        start_s = time.monotonic()
        self._units += 1
        requests = self._requests.make(unit, f"u{unit.step:08d}-{self._units:08d}")
        kv_bytes = self.kv_bytes(unit)
        inbox = Inbox()
        try:
            if self._on_gpu:
                self._runtime.resume_kv()
            self._runtime.rpc(BEGIN, seed=unit_seed(unit))
            self._sample(unit, requests, inbox, announce, prefilled)
        except BaseException as error:
            self._give_up(error)
            raise
        self._rest()
        return UnitReport(
            start_s=start_s,
            prefill_end_s=inbox.prefill_end_s,
            end_s=time.monotonic(),
            decode_steps=inbox.longest - 1,
            vision_prompts=sum(1 for slot in unit.prompts if slot.media),
            kv_bytes=kv_bytes,
        )

    def drop_caches(self) -> None:
        """Nothing is kept between units; asked for again, so that it is certain. An engine with weights of its own
        copies the new ones here."""
        self._runtime.rpc(REST)
        if self._setup.engine.own_weights:
            self._remote.copy()

    def close(self) -> None:
        self._actor.close()
        self._remote.close()
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
        streams = Streams(
            groups=[slot.group for slot in unit.prompts],
            requests=requests,
            stop_ids=sampling.stop_ids,
            forced=bool(sampling.forced_lengths),
            stream=self._runtime.stream,
            inbox=inbox,
        )
        running = self._runtime.submit(streams.run())
        try:
            while True:
                events = self._next(inbox)
                if any(isinstance(event, Prefilled) for event in events):
                    prefilled()
                for event in sorted((e for e in events if isinstance(e, Finished)), key=lambda e: e.index):
                    announce(event.group)
                done = next((event for event in events if isinstance(event, Done)), None)
                if done is not None:
                    if done.error is not None:
                        raise _named(done.error)
                    return
        finally:
            running.cancel()

    def _next(self, inbox: Inbox) -> list[Prefilled | Finished | Done]:
        """What has happened since the last call, at least something."""
        while True:
            try:
                events = [inbox.events.get(timeout=_LOOK_EVERY_S)]
                break
            except queue.Empty:
                self._runtime.require_alive()
                self._require_progress(inbox)
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
        """End what runs, and give the unit's K/V back. The first error is the one that is told."""
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

    @property
    def _on_gpu(self) -> bool:
        return self._setup.spec.device is Memory.CUDA

    @property
    def _room(self) -> int:
        """Tokens of the longest request that SGLang takes without shortening it."""
        return min(self._setup.engine.context_tokens, self._setup.engine.kv_tokens - SPARE_TOKENS)


def unit_seed(unit: Unit) -> int:
    """Of torch's generator: another for every step, purpose and first prompt, the same when a unit is sampled again."""
    sampling = unit.sampling
    first, second = draw_key(seed=sampling.seed, purpose=sampling.purpose, step=unit.step)
    return ((first << 32 | second) ^ unit.prompts[0].row) & _SEED_MASK


def require_offsets(setup: Setup, offsets: dict[str, int]) -> None:
    """Whether SGLang's parameters lie where the table says: without this report it may serve random weights, since it
    goes on when a hook of ours fails.

    Raises:
        EngineError: a parameter lies elsewhere, or there are others.
    """
    needed = places(setup.table, setup.shape, setup.parallel).offsets
    if offsets != needed:
        wrong = sorted(name for name in needed.keys() | offsets.keys() if needed.get(name) != offsets.get(name))
        raise EngineError(
            "SGLang's parameters do not lie where the weights are",
            got=f"{len(wrong)} elsewhere, such as {wrong[0]} at {offsets.get(wrong[0])}",
            needed=f"{needed.get(wrong[0])}",
        )


def require_sizes(setup: Setup, info: dict[str, Any]) -> None:
    """Whether SGLang made the pool that was planned.

    What it counts as weights is only told: it is how much less memory was free after loading than before, to which
    other processes that start at the same time add theirs. That it holds none is known from `require_offsets`.

    Raises:
        EngineError: it did not.
    """
    tokens = info["max_total_num_tokens"]
    if tokens != setup.engine.kv_tokens:
        raise EngineError(
            "SGLang made another pool of keys and values than it was told to",
            got=f"{tokens} tokens",
            needed=f"{setup.engine.kv_tokens}",
            do="Lower rollout.sglang.kv_tokens, or free memory on the GPU.",
        )
    weights_gb = float(info["memory_usage"]["weight"] or 0.0)
    mapped = setup.spec.device is Memory.CUDA and not setup.engine.own_weights
    if mapped and weights_gb > OWN_WEIGHTS_GB:
        log.warning("while SGLang mapped the weights, %.2f GB of the GPU's memory went to others", weights_gb)


def _offer(setup: Setup) -> wire.Offer:
    spec, ref = setup.spec, setup.weights.ref
    return wire.Offer(
        memory=ref.memory,
        size_bytes=ref.size_bytes,
        path=spec.path,
        dtype=spec.dtype,
        freeze_vision=spec.freeze_vision,
        table_hash=setup.table.hash,
        never_sampled=spec.never_sampled,
        parallel=setup.parallel,
        allocator_bytes=allocator_bytes(setup),
        decode_share=setup.engine.decode_share,
        run_dir="" if setup.run_dir is None else str(setup.run_dir),
        own_weights=setup.engine.own_weights,
    )


def _named(error: BaseException) -> BaseException:
    """Errors of ours as they are; what SGLang raises, as an EngineError."""
    if isinstance(error, RollplexError):
        return error
    named = EngineError("SGLang refused a request", got=f"{type(error).__name__}: {error}")
    named.__cause__ = error
    return named
