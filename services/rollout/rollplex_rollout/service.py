"""Carries out the rollout channel's instructions (`rollplex.protocol.rollout`).

Owns what the coordinator is told: which weights version a group came from, what was held, when. Reads the weights'
header; samples nothing itself and imports no tensor library (the engine does, when LoadRollout makes it).

    before LoadRollout    only LoadRollout and Leave
    loaded                as open; the first unit or digest begins with the engine's `drop_caches`
    open                  GenerateUnit, DigestRequest, Drain
    drained               from Drain to Committed: the weights are not read; GenerateUnit is refused

All workers load at the same time, so that an engine may have seen the weights before the trainer had filled them: what
it derived from them then (a copy, an encoded prompt) is as old as that of a version that was updated since.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias, assert_never

from rollplex.errors import BudgetError, StateError
from rollplex.protocol.common import (
    CachesDropped,
    Committed,
    DigestReply,
    DigestRequest,
    Drain,
    Drained,
    Held,
    Leave,
    Loaded,
    Logprobs,
    Responses,
)
from rollplex.protocol.rollout import (
    FromRollout,
    GenerateUnit,
    GroupFinished,
    LoadRollout,
    Prefilled,
    ToRollout,
    UnitGenerated,
)
from rollplex_rollout.engine import EngineFactory, FinishedGroup, Unit
from rollplex_rollout.loaded import Attach, LoadedRollout, named_engine

Reply: TypeAlias = Callable[[FromRollout], None]


class RolloutService:
    """One rollout process. Before LoadRollout it can do nothing."""

    def __init__(self, segments: Attach, make_engine: EngineFactory | None = None) -> None:
        """make_engine: how LoadRollout makes the engine; None: by the name that it says, imported then."""
        self._segments = segments
        self._make_engine = make_engine or named_engine
        self._loaded: LoadedRollout | None = None
        self._drained = False
        self._settled = False

    def handle(self, message: ToRollout, reply: Reply) -> None:
        """Carry out one instruction and answer it.

        Raises:
            StateError: an instruction out of turn.
            StaleWeightsError: the header is not STABLE at the instruction's version, before or after.
            BudgetError: the unit's K/V do not fit its lease; nothing has been allocated.
            RollplexError: whatever the engine, the model or a segment raises.
        """
        match message:
            case LoadRollout():
                reply(self._load(message))
            case GenerateUnit():
                self._generate(message, reply)
            case Drain():
                self._drained = True
                reply(Drained(cause=message.cause, version=self._ready.header.require(message.version).version))
            case Committed():
                reply(self._committed(message))
            case DigestRequest():
                reply(self._digest(message))
            case Leave():
                self.close()
            case _:
                assert_never(message)

    def _load(self, message: LoadRollout) -> Loaded:
        if self._loaded is not None:
            raise StateError("The model is loaded already", got="a second LoadRollout", needed="one")
        self._loaded = LoadedRollout(message, self._segments, self._make_engine)
        return Loaded(
            cause=message.cause,
            table_bytes=self._loaded.setup.weight_bytes,
            on_policy=self._loaded.engine.on_policy,
        )

    def _generate(self, message: GenerateUnit, reply: Reply) -> None:
        ready = self._ready
        where = f"step {message.step}, decode unit {message.unit}"
        if self._drained:
            raise StateError("A unit came while the weights may not be read", needed="Committed first", where=where)
        unit = Unit(
            step=message.step,
            prompts=message.prompts,
            sampling=message.sampling,
            inputs=self._segments.attach(message.inputs),
            inputs_fd=self._segments.descriptor(message.inputs),
        )
        unit.check()
        needed = ready.engine.kv_bytes(unit)
        if needed > message.kv.size_bytes:
            raise BudgetError(
                "The lease is too small for a unit's keys and values",
                got=f"{message.kv.size_bytes} bytes",
                needed=f"{needed}",
                where=where,
            )
        start = ready.header.require(message.version).version
        self._settle(ready)

        def announce(group: FinishedGroup) -> None:
            end = ready.header.require(message.version).version
            reply(_group_message(message, group, start, end))

        def prefilled() -> None:
            reply(Prefilled(cause=message.cause, step=message.step, unit=message.unit, end_s=time.monotonic()))

        report = ready.engine.generate(unit, announce, prefilled)
        self._segments.detach(message.inputs.segment)
        reply(
            UnitGenerated(
                cause=message.cause,
                step=message.step,
                unit=message.unit,
                start_s=report.start_s,
                prefill_end_s=report.prefill_end_s,
                end_s=report.end_s,
                decode_steps=report.decode_steps,
                vision_prompts=report.vision_prompts,
                held=(Held(lease=message.kv.lease, size_bytes=report.kv_bytes),),
            )
        )

    def _committed(self, message: Committed) -> CachesDropped:
        ready = self._ready
        ready.engine.drop_caches()
        version = ready.header.require(message.version).version
        self._settled = True
        self._drained = False
        return CachesDropped(cause=message.cause, version=version)

    def _digest(self, message: DigestRequest) -> DigestReply:
        ready = self._ready
        version = ready.header.read().version
        ready.header.require(version)
        self._settle(ready)
        ready.engine.check_mapped()
        value = ready.engine.digest()
        ready.header.require(version)
        return DigestReply(cause=message.cause, version=version, digest=value)

    def _settle(self, ready: LoadedRollout) -> None:
        """Once, when the header has shown that the weights are filled: forget what was seen of them before."""
        if not self._settled:
            ready.engine.drop_caches()
            self._settled = True

    def close(self) -> None:
        """End the engine, whose processes and folders the kernel does not clear away with this one."""
        if self._loaded is not None:
            self._loaded.engine.close()
            self._loaded = None

    @property
    def _ready(self) -> LoadedRollout:
        if self._loaded is None:
            raise StateError("An instruction came before the model was loaded", needed="LoadRollout first")
        return self._loaded


def _group_message(unit: GenerateUnit, group: FinishedGroup, start: int, end: int) -> GroupFinished:
    return GroupFinished(
        cause=unit.cause,
        step=unit.step,
        version_start=start,
        version_end=end,
        responses=Responses(
            group=group.group, lengths=group.lengths, tokens=group.tokens.astype("<i4", copy=False).tobytes()
        ),
        logprobs=Logprobs(group=group.group, values=group.logprobs.astype("<f8", copy=False).tobytes()),
        stopped=group.stopped,
        end_s=time.monotonic(),
    )
