"""Carries out the prefix channel's instructions (`rollplex.protocol.prefix`).

Owns this process's models over the mapped weights, its gradient arena, and the live units. Does not know when a unit
should run, nor what the trainer does with it.

Before an answer, everything that it speaks of is complete on the device (`rollplex.model.device`): the trainer reads K
and V as soon as it hears of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import assert_never

import torch

from rollplex.errors import StateError
from rollplex.layout.kv import KvLayout
from rollplex.memory.tensors import kv_views, require_mapped, tensor
from rollplex.model.batch import PromptBatch, prompt_batch
from rollplex.model.device import finish, private_memory, trim
from rollplex.model.measure import GraphMeter, ScratchMeter
from rollplex.model.prefix import PrefixState, export_state, prefix_backward, prefix_forward
from rollplex.model.responses import response_batch, split_values
from rollplex.model.suffix import suffix_forward
from rollplex.multiprocessors import Side
from rollplex.protocol.common import (
    CachesDropped,
    Committed,
    DigestReply,
    DigestRequest,
    Drain,
    Drained,
    Held,
    LeaseRef,
    Leave,
    Loaded,
    PromptSlot,
    SegmentRef,
)
from rollplex.protocol.prefix import (
    FromPrefix,
    LoadPrefix,
    PrefixBackward,
    PrefixBackwardDone,
    PrefixForward,
    PrefixReady,
    ScoreSuffix,
    SuffixScored,
    ToPrefix,
    Which,
)
from rollplex.worker import Segments
from rollplex_prefix.loaded import LoadedPrefix
from rollplex_prefix.units import ActorUnit, Again, ReferenceUnit, Units

NO_STEP = -1
Reply = Callable[[FromPrefix], None]


class PrefixService:
    """One prefix process. Before LoadPrefix it can do nothing."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._loaded: LoadedPrefix | None = None
        self._units = Units()
        self._inputs: set[int] = set()
        self._arena_step = NO_STEP
        self._drained = False

    def handle(self, message: ToPrefix, reply: Reply) -> None:
        """Carry out one instruction and answer it."""
        match message:
            case LoadPrefix():
                self._loaded = LoadedPrefix(message, self._segments)
                finish(self._loaded.device)
                reply(Loaded(cause=message.cause, table_bytes=self._loaded.total_bytes))
            case PrefixForward():
                reply(self._forward(message))
            case ScoreSuffix():
                reply(self._score(message))
            case PrefixBackward():
                reply(self._backward(message))
            case Drain():
                self._units.require_empty()
                trim(self._ready.device)
                self._drained = True
                reply(Drained(cause=message.cause, version=self._ready.header.require(message.version).version))
            case Committed():
                self._drop_inputs()
                self._arena_step = NO_STEP  # also if the same step begins again
                header = self._ready.header.require(message.version)
                self._drained = False
                reply(CachesDropped(cause=message.cause, version=header.version))
            case DigestRequest():
                header = self._ready.header.require(self._ready.header.read().version)
                require_mapped(self._ready.mapping, dict(self._ready.actor.named_parameters()))
                value = self._ready.digest()
                self._ready.header.require(header.version)
                reply(DigestReply(cause=message.cause, version=header.version, digest=value))
            case Leave():
                raise AssertionError("the runtime ends on Leave")
            case _:
                assert_never(message)

    def _forward(self, message: PrefixForward) -> PrefixReady:
        ready = self._ready
        if self._drained:
            where = f"step {message.step}, {message.which} prefix unit {message.unit}"
            raise StateError("a unit while the weights may not be read", needed="Committed first", where=where)
        ready.header.require(message.version)
        start_s = time.monotonic()
        lease = message.lease
        share = ready.multiprocessors.on_share(message.share, Side.LAST)
        with share, self._private(f"{message.which} prefix unit {message.unit}", lease):
            batch = self._batch(message.inputs, message.prompts, message.copies)
            if message.which is Which.ACTOR:
                held = self._actor_forward(message, batch)
            else:
                held = self._reference_forward(message, batch)
            finish(ready.device)
        ready.header.require(message.version)
        return PrefixReady(
            cause=message.cause,
            step=message.step,
            unit=message.unit,
            which=message.which,
            start_s=start_s,
            end_s=time.monotonic(),
            vision_prompts=batch.vision_prompts,
            held=() if lease is None else (Held(lease=lease.lease, size_bytes=held),),
        )

    def _actor_forward(self, message: PrefixForward, batch: PromptBatch) -> int:
        if message.kv is None:
            raise StateError("an actor prefix needs a segment for its K/V", got="none", needed="kv")
        ready = self._ready
        layout = KvLayout(ready.kv_shape, batch.rows, batch.tokens, ready.table.dtype)
        kv = kv_views(self._segments.attach(message.kv), layout)
        kept: PrefixState | Again
        layers = message.activations.by_layers
        if message.activations.again:
            prefix_forward(ready.actor, batch, grad=False, into=kv)
            kept = Again(inputs=message.inputs, prompts=message.prompts, copies=message.copies, layers=layers)
            held = 0
        else:
            kept, held = self._with_graph(batch, layers=layers)
            export_state(kept, kv)
        self._units.keep_actor(
            message.unit,
            ActorUnit(step=message.step, version=message.version, kept=kept, segment=message.kv.segment, views=kv),
        )
        return held

    def _with_graph(self, batch: PromptBatch, *, layers: bool = False) -> tuple[PrefixState, int]:
        """The actor's state with its graph, and the bytes that both hold."""
        actor = self._ready.actor
        with GraphMeter() as meter:
            state = prefix_forward(actor, batch, grad=True, layers=layers)
        outputs = (*state.keys, *state.values, state.last_hidden)
        return state, meter.held_bytes(outputs, excluding=actor.parameters())

    def _reference_forward(self, message: PrefixForward, batch: PromptBatch) -> int:
        if self._ready.reference is None:
            raise StateError(
                "a reference prefix without a reference", got="LoadPrefix.reference None", needed="a segment"
            )
        state = prefix_forward(self._ready.reference, batch, grad=False)
        groups = tuple(slot.group for slot in message.prompts)
        self._units.keep_reference(
            message.unit, ReferenceUnit(step=message.step, state=state, groups=groups, copies=message.copies)
        )
        return state.size_bytes

    def _score(self, message: ScoreSuffix) -> SuffixScored:
        ready = self._ready
        start_s = time.monotonic()
        entry = self._units.reference(message.unit, message.step)
        rows = entry.rows(tuple(r.group for r in message.responses))
        tokens, lengths = response_batch(message.responses, device=ready.device)
        assert ready.reference is not None, "a reference unit exists"
        private = self._private(f"scoring of suffix unit {message.suffix_unit}", message.workspace)
        with private, torch.no_grad(), ScratchMeter() as scratch:
            out = suffix_forward(
                ready.reference,
                entry.state.select(rows),
                tokens,
                lengths,
                temperature=ready.temperature,
                never_sampled=ready.never_sampled,
            )
        if message.release:
            del entry
            self._units.drop_reference(message.unit)
            trim(ready.device)  # its lease ends with this answer, and a segment may be granted in its place
        return SuffixScored(
            cause=message.cause,
            step=message.step,
            suffix_unit=message.suffix_unit,
            logprobs=split_values(out.logprobs, message.responses),
            start_s=start_s,
            end_s=time.monotonic(),
            held=(Held(lease=message.workspace.lease, size_bytes=scratch.peak_bytes),),
        )

    def _backward(self, message: PrefixBackward) -> PrefixBackwardDone:
        ready = self._ready
        ready.header.require(message.version)
        start_s = time.monotonic()
        if self._arena_step != message.step:
            for gradient in ready.gradients.values():
                gradient.zero_()
            self._arena_step = message.step
        entry = self._units.take_actor(message.unit, message.step, message.version)
        with self._private(f"backward of prefix unit {message.unit}", message.workspace):
            held = self._run_backward(entry, message)
            finish(ready.device)  # also because the segment is unmapped next
        segment, kept = entry.segment, not isinstance(entry.kept, Again)
        del entry
        self._segments.detach(segment)
        if kept:
            trim(ready.device)  # as where a reference unit ends
        ready.header.require(message.version)
        return PrefixBackwardDone(
            cause=message.cause,
            step=message.step,
            unit=message.unit,
            start_s=start_s,
            end_s=time.monotonic(),
            held=held,
        )

    def _run_backward(self, entry: ActorUnit, message: PrefixBackward) -> tuple[Held, ...]:
        """Adds the unit's gradients to the arena; returns what was held for it beyond its forward's lease."""
        state = entry.kept
        held: tuple[Held, ...] = ()
        if isinstance(state, Again):
            if message.workspace is None:
                raise StateError(
                    f"prefix unit {message.unit} kept no graph, so its forward runs again",
                    got="no workspace",
                    needed="workspace",
                )
            batch = self._batch(state.inputs, state.prompts, state.copies)
            state, size_bytes = self._with_graph(batch, layers=state.layers)
            held = (Held(lease=message.workspace.lease, size_bytes=size_bytes),)
        prefix_backward(state, entry.views.d_keys, entry.views.d_values, entry.views.d_last_hidden)
        return held

    def _batch(self, inputs: SegmentRef, prompts: tuple[PromptSlot, ...], copies: int) -> PromptBatch:
        mapping = self._segments.attach(inputs)
        self._inputs.add(inputs.segment)
        ready = self._ready
        return prompt_batch(
            lambda at, shape, dtype: tensor(mapping, at, shape, dtype),
            prompts,
            ready.row_width,
            copies,
            device=ready.device,
        )

    def _private(self, unit: str, lease: LeaseRef | None) -> AbstractContextManager[None]:
        asked_bytes = 0 if lease is None else lease.size_bytes
        return private_memory(unit, asked_bytes=asked_bytes, cap_bytes=self._ready.private_bytes)

    def _drop_inputs(self) -> None:
        for segment in self._inputs:
            self._segments.detach(segment)
        self._inputs.clear()

    @property
    def _ready(self) -> LoadedPrefix:
        if self._loaded is None:
            raise StateError("an instruction before the model is loaded", needed="LoadPrefix first")
        return self._loaded
