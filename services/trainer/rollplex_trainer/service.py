"""Carries out the trainer channel's instructions (`rollplex.protocol.trainer`).

Owns: the order of what an instruction does to weights, gradients and header. Does not know: when a unit should run,
who else reads the weights, what a step is worth.

    TrainSuffix      header = version? ▸ forward ▸ loss ▸ backward: K/V gradients into the unit's segment, the rest into
                     this process's arena
    TrainWhole       header = version? ▸ the same without a split: all gradients into this process's arena
    PrepareUpdate    arena += prefix arena ▸ (+= other replicas') ▸ / normaliser ▸ norm ▸ finite? ▸ clip ▸ vote
    KeepGradients    the arena, as it was voted on, into a file
    ApplyUpdate      header UPDATING ▸ step ▸ finite? ▸ digest ▸ header version + 1, STABLE ▸ arena = 0
    Publish          of several trainers, which leave the header UPDATING: copies ▸ digest ▸ header, STABLE
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

from rollplex.checkpoint.folder import Identity, save
from rollplex.errors import StateError, UpdateError
from rollplex.memory.tensors import require_mapped
from rollplex.model.device import finish, private_memory, trim
from rollplex.model.measure import ScratchMeter
from rollplex.model.responses import split_values
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
    Published,
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
from rollplex_trainer.loaded import LoadedTrainer
from rollplex_trainer.optimizer import clip_factor
from rollplex_trainer.ranks import RankTrainer
from rollplex_trainer.ready import ReadyTrainer, SegmentSource, libraries
from rollplex_trainer.schedule import learning_rate
from rollplex_trainer.step import Stage, Step
from rollplex_trainer.suffix import train_suffix
from rollplex_trainer.unit import read_unit
from rollplex_trainer.whole import train_whole

Reply = Callable[[FromTrainer], None]


class TrainerService:
    """One trainer process. Before LoadTrainer it can do nothing."""

    def __init__(self, segments: SegmentSource) -> None:
        self._segments = segments
        self._loaded: ReadyTrainer | None = None
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
                reply(self._publish(message))
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
        alone = message.parallel.alone and not message.shards.actors
        self._loaded = (LoadedTrainer if alone else RankTrainer)(message, self._segments)
        finish(self._loaded.device)
        return Loaded(
            cause=message.cause,
            table_bytes=self._loaded.total_bytes,
            libraries=libraries(self._loaded.device),
            digest="" if self._loaded.several else self._loaded.header.read().digest,
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
            kv = self._segments.attach(message.kv)
            logprobs, held_bytes = train_suffix(ready, message, unit, kv, step.metrics)
        del kv
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
        if not isinstance(ready, LoadedTrainer):
            raise StateError("Whole sequences for one of several trainers", needed="one that has all of the model")
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

    def _prepare(self, message: PrepareUpdate) -> UpdateVote:
        ready = self._ready
        trim(ready.device)
        start_s = time.monotonic()
        ready.header.require(message.version)
        step = self._step_of(message.step, message.version)
        step.require(Stage.OPEN, "prepare the update")
        if step.has_units:
            ready.arena.add_(ready.prefix_arena)
        sums = ready.sum_step(step.metrics)
        normaliser = sums.normaliser
        if normaliser > 0:
            ready.arena.div_(normaliser)
        norm = ready.gradient_norm()
        finite = normaliser > 0 and math.isfinite(norm)
        if finite and (factor := clip_factor(norm, ready.settings.max_grad_norm)) < 1.0:
            ready.arena.mul_(factor)
        step.stage = Stage.ACCEPTED if finite and not step.whole else Stage.REFUSED
        rate = learning_rate(ready.settings, message.version)
        metrics = sums.result(grad_norm=norm, learning_rate=rate)
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
        size_bytes = self._ready.keep_gradients(Path(message.file))
        return GradientsKept(cause=message.cause, step=message.step, size_bytes=size_bytes)

    def _apply(self, message: ApplyUpdate) -> UpdateApplied:
        ready = self._ready
        start_s = time.monotonic()
        self._open_step(message.step, message.version).require(Stage.ACCEPTED, "apply the update")
        ready.begin_update(message.version)
        try:
            with self._private("the optimizer step", 0):
                ready.optimizer.step(learning_rate(ready.settings, message.version))
            finish(ready.device)  # the version is published last: after every weight, wherever the header lies
            if not ready.weights_finite():
                raise UpdateError(
                    "The update left weights that are not finite",
                    got="NaN or infinity in the actor weights",
                    needed="finite numbers",
                    do="Restore the last checkpoint; lower optimizer.lr or optimizer.max_grad_norm",
                    where=", ".join([f"step {message.step}, version {message.version}", *ready.place]),
                )
            digest = "" if ready.several else ready.digest()
        except BaseException:
            ready.poison()
            raise
        ready.end_update(message.version + 1, digest)
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

    def _publish(self, message: Publish) -> Published:
        ready = self._ready
        if not isinstance(ready, RankTrainer):
            raise StateError("Publish to a trainer that is alone", needed="several trainers")
        start_s = time.monotonic()
        if self._step is not None:
            raise StateError("Publish inside a step", got=f"step {self._step.step}", needed="its update before")
        done = ready.publish(message.version)
        return Published(
            cause=message.cause,
            version=message.version,
            digest=done.digest,
            refreshed_bytes=done.copied.refreshed,
            rebuilt_bytes=done.copied.rebuilt,
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
        digest = ready.checkpoint_digest(message.version)
        size_bytes = save(
            Path(message.folder),
            Identity(step=message.step, version=message.version, digest=digest, table_hash=ready.table.hash),
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
    def _ready(self) -> ReadyTrainer:
        if self._loaded is None:
            raise StateError("An instruction before the weights are loaded", needed="LoadTrainer first")
        return self._loaded
