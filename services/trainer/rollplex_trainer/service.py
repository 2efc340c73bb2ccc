"""Carries out the trainer channel's instructions (`rollplex.protocol.trainer`).

Owns: the order of what an instruction does to weights, gradients and header. Does not know: when a unit should run,
who else reads the weights, what a step is worth.

    TrainSuffix      header = version? ▸ forward ▸ loss ▸ backward: K/V gradients into the unit's segment, the rest into
                     this process's arena
    TrainWhole       header = version? ▸ the same without a split: all gradients into this process's arena
    PrepareUpdate    arena += prefix arena ▸ / normaliser ▸ norm ▸ finite? ▸ clip ▸ vote
    KeepGradients    the arena, as it was voted on, into a file
    ApplyUpdate      header UPDATING ▸ step ▸ finite? ▸ digest ▸ header version + 1, STABLE ▸ arena = 0
    SkipUpdate       arena = 0

Before an answer, everything that it speaks of is complete on the device (`rollplex.model.device`): the prefix service
reads the gradients of K and V, and every reader the weights, as soon as they hear of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import assert_never

import torch
from torch import Tensor, autograd

from rollplex.checkpoint.folder import Identity, save
from rollplex.errors import StateError, UpdateError
from rollplex.layout.kv import KvLayout
from rollplex.memory.tensors import KvViews, kv_views, require_mapped
from rollplex.model.device import finish, private_memory, trim
from rollplex.model.measure import GraphMeter, ScratchMeter
from rollplex.model.prefix import PrefixState, leaf_state
from rollplex.model.responses import split_values
from rollplex.model.suffix import suffix_forward
from rollplex.protocol.common import DigestReply, DigestRequest, Held, Leave, Loaded
from rollplex.protocol.trainer import (
    ApplyUpdate,
    CheckpointSaved,
    FromTrainer,
    GradientsKept,
    KeepGradients,
    LoadTrainer,
    PrepareUpdate,
    Publish,
    SaveCheckpoint,
    SkipUpdate,
    SuffixTrained,
    ToTrainer,
    TrainSuffix,
    TrainWhole,
    UpdateApplied,
    UpdateSkipped,
    UpdateVote,
    WholeTrained,
)
from rollplex_trainer.gradient_file import keep_gradients
from rollplex_trainer.loaded import LoadedTrainer, SegmentSource, libraries
from rollplex_trainer.losses import unit_loss
from rollplex_trainer.optimizer import all_finite, clip_factor, global_norm
from rollplex_trainer.schedule import learning_rate
from rollplex_trainer.step import Stage, Step
from rollplex_trainer.unit import SuffixUnit, read_unit
from rollplex_trainer.whole import train_whole

Reply = Callable[[FromTrainer], None]


class TrainerService:
    """One trainer process. Before LoadTrainer it can do nothing."""

    def __init__(self, segments: SegmentSource) -> None:
        self._segments = segments
        self._loaded: LoadedTrainer | None = None
        self._step: Step | None = None

    def handle(self, message: ToTrainer, reply: Reply) -> None:
        """Carry out one instruction and answer it."""
        match message:
            case LoadTrainer():
                reply(self._load(message))
            case TrainSuffix():
                reply(self._train(message))
            case TrainWhole():
                reply(self._train_whole(message))
            case PrepareUpdate():
                reply(self._prepare(message))
            case KeepGradients():
                reply(self._keep_gradients(message))
            case ApplyUpdate():
                reply(self._apply(message))
            case Publish():
                raise StateError("Publish to a trainer that is alone", needed="several ranks")
            case SkipUpdate():
                reply(self._skip(message))
            case SaveCheckpoint():
                reply(self._save(message))
            case DigestRequest():
                version = self._ready.header.read().version
                require_mapped(self._ready.mapping, dict(self._ready.model.named_parameters()))
                reply(DigestReply(cause=message.cause, version=version, digest=self._ready.digest()))
            case Leave():
                raise AssertionError("the runtime ends on Leave")
            case _:
                assert_never(message)

    def _load(self, message: LoadTrainer) -> Loaded:
        if self._loaded is not None:
            raise StateError("A second LoadTrainer", got="weights that are loaded", needed="a new process")
        self._loaded = LoadedTrainer(message, self._segments)
        finish(self._loaded.device)
        return Loaded(
            cause=message.cause,
            table_bytes=self._loaded.table.total_bytes,
            libraries=libraries(self._loaded.device),
        )

    def _train(self, message: TrainSuffix) -> SuffixTrained:
        ready = self._ready
        start_s = time.monotonic()
        ready.header.require(message.version)
        step = self._step_of(message.step, message.version)
        unit = read_unit(message, ready.algorithm, ready.shape.vocab, device=ready.device)
        step.begin_unit(message.suffix_unit)
        asked_bytes = message.workspace.size_bytes + message.scratch.size_bytes
        with self._private(f"suffix unit {message.suffix_unit}", asked_bytes), ScratchMeter() as scratch:
            logprobs, held_bytes = self._forward_backward(message, unit, step)
        finish(ready.device)  # the gradients of K and V are there before the prefix service hears of it
        ready.header.require(message.version)
        if message.release:
            self._segments.detach(message.kv.segment)
        return SuffixTrained(
            cause=message.cause,
            step=message.step,
            suffix_unit=message.suffix_unit,
            start_s=start_s,
            end_s=time.monotonic(),
            held=(
                Held(lease=message.workspace.lease, size_bytes=held_bytes),
                Held(lease=message.scratch.lease, size_bytes=scratch.peak_bytes),
            ),
            logprobs=split_values(logprobs, message.responses) if message.return_logprobs else (),
        )

    def _train_whole(self, message: TrainWhole) -> WholeTrained:
        ready = self._ready
        start_s = time.monotonic()
        ready.header.require(message.version)
        step = self._step_of(message.step, message.version)
        unit = read_unit(message, ready.algorithm, ready.shape.vocab, device=ready.device)
        step.begin_whole()
        inputs = self._segments.attach(message.inputs)
        asked_bytes = message.workspace.size_bytes + message.scratch.size_bytes
        with self._private("a whole sequence", asked_bytes):
            logprobs, held_bytes = train_whole(ready, message, unit, inputs, step.metrics)
        del inputs
        finish(ready.device)
        ready.header.require(message.version)
        self._segments.detach(message.inputs.segment)
        return WholeTrained(
            cause=message.cause,
            step=message.step,
            start_s=start_s,
            end_s=time.monotonic(),
            held=(Held(lease=message.workspace.lease, size_bytes=held_bytes),),
            logprobs=split_values(logprobs, message.responses),
        )

    def _forward_backward(self, message: TrainSuffix, unit: SuffixUnit, step: Step) -> tuple[Tensor, int]:
        """Gradients and metrics of one unit; returns its log-probabilities and the bytes that its graph held. No view
        of the K/V segment is left when this returns."""
        ready = self._ready
        kv = self._kv(message)
        if message.first:
            kv.gradients.zero_()
        prefix = _leaves(message, unit, kv)
        with GraphMeter() as meter:
            out = suffix_forward(
                ready.model,
                prefix,
                unit.tokens,
                unit.lengths,
                temperature=ready.algorithm.temperature,
                never_sampled=ready.never_sampled,
                entropy=True,
            )
        assert out.entropy is not None, "asked for"
        outside = (*ready.weights.values(), *prefix.keys, *prefix.values, prefix.last_hidden)
        held_bytes = meter.held_bytes((out.logprobs, out.entropy), excluding=outside)
        parts = unit_loss(
            ready.algorithm,
            logprobs=out.logprobs,
            old=out.logprobs.detach(),
            reference=None if unit.reference is None else unit.reference.to(out.logprobs.dtype),
            entropy=out.entropy,
            mask=out.mask,
            advantages=unit.advantages,
            weights=unit.weights,
        )
        autograd.backward(parts.total)
        step.metrics.add(unit, parts, out.logprobs, out.entropy, out.mask)
        return out.logprobs.detach(), held_bytes

    def _prepare(self, message: PrepareUpdate) -> UpdateVote:
        ready = self._ready
        trim(ready.device)
        start_s = time.monotonic()
        ready.header.require(message.version)
        step = self._step_of(message.step, message.version)
        step.require(Stage.OPEN, "prepare the update")
        normaliser = step.metrics.normaliser
        if not step.whole:
            ready.arena.add_(ready.prefix_arena)
        if normaliser > 0:
            ready.arena.div_(normaliser)
        norm = global_norm(ready.arena)
        finite = normaliser > 0 and math.isfinite(norm)
        if finite and (factor := clip_factor(norm, ready.settings.max_grad_norm)) < 1.0:
            ready.arena.mul_(factor)
        step.stage = Stage.ACCEPTED if finite and not step.whole else Stage.REFUSED
        rate = learning_rate(ready.settings, message.version)
        metrics = step.metrics.result(grad_norm=norm, learning_rate=rate)
        finish(ready.device)
        return UpdateVote(
            cause=message.cause,
            step=message.step,
            finite=finite,
            start_s=start_s,
            end_s=time.monotonic(),
            metrics=metrics,
        )

    def _keep_gradients(self, message: KeepGradients) -> GradientsKept:
        self._open_step(message.step).require(Stage.ACCEPTED, "keep the gradients")
        size_bytes = keep_gradients(self._ready.arena, Path(message.file))
        return GradientsKept(cause=message.cause, step=message.step, size_bytes=size_bytes)

    def _apply(self, message: ApplyUpdate) -> UpdateApplied:
        ready = self._ready
        start_s = time.monotonic()
        self._open_step(message.step, message.version).require(Stage.ACCEPTED, "apply the update")
        ready.header.begin_update(message.version)
        try:
            with self._private("the optimizer step", 0):
                ready.optimizer.step(learning_rate(ready.settings, message.version))
            finish(ready.device)  # the version is published last: after every weight, wherever the header lies
            if not all_finite(ready.parameters):
                raise UpdateError(
                    "The update left weights that are not finite",
                    got="NaN or infinity in the actor weights",
                    needed="finite numbers",
                    do="Restore the last checkpoint; lower optimizer.lr or optimizer.max_grad_norm",
                    where=f"step {message.step}, version {message.version}",
                )
            digest = ready.digest()
        except BaseException:
            ready.header.poison()
            raise
        ready.header.publish(message.version + 1, digest)
        self._drop_gradients()
        finish(ready.device)
        return UpdateApplied(
            cause=message.cause,
            step=message.step,
            version=message.version + 1,
            digest=digest,
            start_s=start_s,
            end_s=time.monotonic(),
        )

    def _skip(self, message: SkipUpdate) -> UpdateSkipped:
        step = self._open_step(message.step)
        if step.stage is Stage.OPEN:
            step.require(Stage.REFUSED, "skip the update")
        self._drop_gradients()
        return UpdateSkipped(cause=message.cause, step=message.step)

    def _save(self, message: SaveCheckpoint) -> CheckpointSaved:
        ready = self._ready
        header = ready.header.require(message.version)
        size_bytes = save(
            Path(message.folder),
            Identity(step=message.step, version=message.version, digest=header.digest, table_hash=ready.table.hash),
            needed_bytes=ready.checkpoint_bytes,
            write=lambda folder: ready.write_checkpoint(folder, message.state_json),
            libraries=libraries(ready.device),
        )
        return CheckpointSaved(
            cause=message.cause,
            step=message.step,
            version=message.version,
            folder=message.folder,
            size_bytes=size_bytes,
        )

    def _kv(self, message: TrainSuffix) -> KvViews:
        ready = self._ready
        rows = len(message.prompts) * message.copies
        layout = KvLayout(ready.shape, rows, max(prompt.tokens for prompt in message.prompts), ready.table.dtype)
        return kv_views(self._segments.attach(message.kv), layout)

    def _step_of(self, step: int, version: int) -> Step:
        """The present step, opened if there is none."""
        if self._step is None:
            self._step = Step(step, version, self._ready.algorithm)
        self._step.require_same(step, version)
        return self._step

    def _open_step(self, step: int, version: int | None = None) -> Step:
        """The present step. Raises StateError if there is none, or it is another one."""
        if self._step is None:
            raise StateError("The trainer has no gradients", got=f"step {step}", needed="PrepareUpdate before")
        self._step.require_same(step, version)
        return self._step

    def _drop_gradients(self) -> None:
        self._ready.arena.zero_()
        trim(self._ready.device)
        self._step = None

    def _private(self, unit: str, asked_bytes: int) -> AbstractContextManager[None]:
        return private_memory(unit, asked_bytes=asked_bytes, cap_bytes=self._ready.private_bytes)

    @property
    def _ready(self) -> LoadedTrainer:
        if self._loaded is None:
            raise StateError("An instruction before the weights are loaded", needed="LoadTrainer first")
        return self._loaded


def _leaves(message: TrainSuffix, unit: SuffixUnit, kv: KvViews) -> PrefixState:
    device = unit.tokens.device
    lengths = torch.tensor([prompt.tokens for prompt in message.prompts], device=device)
    positions = torch.tensor([prompt.next_position for prompt in message.prompts], device=device)
    return leaf_state(
        kv,
        lengths.repeat_interleave(message.copies),
        positions.repeat_interleave(message.copies),
        unit.prefix_rows,
    )
