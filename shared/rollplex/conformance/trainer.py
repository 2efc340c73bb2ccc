"""The cases of a trainer: log-probabilities, gradients, the update, the header, a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from rollplex.checkpoint.folder import LATEST, verify
from rollplex.conformance.judging import close_enough
from rollplex.conformance.reading import READER, ask_digest
from rollplex.conformance.sitting import Broken, Own, Sheet, Sitting, Violation
from rollplex.conformance.world import SAMPLES, Weights, World
from rollplex.errors import RollplexError
from rollplex.layout.optimizer import STEP_OFFSET, optimizer_table
from rollplex.memory.header import State
from rollplex.memory.tensors import kv_views, optimizer_views
from rollplex.model.prefix import export_state, leaf_state, prefix_forward
from rollplex.model.responses import response_batch
from rollplex.model.suffix import suffix_forward
from rollplex.protocol.common import DigestReply, DigestRequest, Kind, LeaseRef, Loaded, Logprobs, Role
from rollplex.protocol.trainer import (
    Algorithm,
    ApplyUpdate,
    CheckpointSaved,
    LoadTrainer,
    Loss,
    Optimizer,
    PrepareUpdate,
    SaveCheckpoint,
    Scale,
    SkipUpdate,
    Standing,
    SuffixTrained,
    TrainSuffix,
    UpdateApplied,
    UpdateSkipped,
    UpdateVote,
)

TEMPERATURE = 0.8
LEARNING_RATE = 0.05
NUMBERS = 1e-3
"""How far numbers may lie from ours, relative to the largest; log-probabilities absolute."""
COSINE = 0.9999
"""Least, between our gradient and the trainer's, which may be normalised in its own way."""
LEASE_BYTES = 2**26
ALGORITHM = Algorithm(
    loss=Loss.DR_GRPO,
    scale_rewards=Scale.NONE,
    clip_low=0.2,
    clip_high=0.2,
    kl="k3",
    beta=0.0,
    entropy_bonus=0.0,
    temperature=TEMPERATURE,
    max_new_tokens=8,
)
OPTIMIZER = Optimizer(
    name="sgd",
    lr=LEARNING_RATE,
    betas=(0.9, 0.95),
    eps=1e-8,
    momentum=0.0,
    weight_decay=0.0,
    max_grad_norm=0.0,
    schedule="constant",
    warmup_steps=0,
    total_steps=10,
    final_lr_ratio=1.0,
)

RULES: Final = {
    "filled": "LoadTrainer fills the weights from the folder and publishes version 0 with their digest",
    "digest": READER["digest"],
    "logprobs": "log-probabilities are those of the definition, within 1e-3 of transformers'",
    "kv_gradients": "the gradients of K, V and the last hidden state lie in the unit's segment, and are ours",
    "vote": "PrepareUpdate sums the arenas and votes; the gradient is ours, and no weight has changed",
    "update": "ApplyUpdate takes one step of the optimizer that it was given, in place",
    "header": "UPDATING before the first weight changes; the next version, and the digest of the bytes, last",
    "skip": "gradients that are not finite are voted down; SkipUpdate leaves the weights as they are",
    "checkpoint": "a checkpoint holds the weights of its version, un-fused, and verifies",
}
STANDING: Final = {
    "standing": "with `standing` it fills nothing: weights, version and optimizer state are gone on with"
}
UNLIKE: Final = {
    "standing_refused": "with `standing` of another digest than the bytes have it refuses, and changes nothing"
}
LEFT_VERSION, LEFT_STEPS = 3, 7
"""Of what an earlier trainer left."""
LEFT_OPTIMIZER = replace(OPTIMIZER, name="adamw")
"""One that keeps something of each number."""


class TrainerKit:
    """A trainer's instructions (`rollplex.conformance.cases.Kit`)."""

    role = Role.TRAINER
    rules: Mapping[str, str] = RULES
    unit_answer: type = SuffixTrained
    version = 0

    def __init__(self, world: World) -> None:
        self._world = world
        self._actor = world.weights(filled=False)
        self._arena, self._prefix_arena = world.arena(), world.arena()
        states = optimizer_table(world.table, name=OPTIMIZER.name, momentum=OPTIMIZER.momentum)
        self._states = world.create(Kind.OPTIMIZER_STATE, states.total_bytes)
        self._kv, self._layout = world.kv(len(world.slots))
        self._responses = world.responses(seed=2)
        self._rewards = [np.random.default_rng(slot.group).random(SAMPLES) for slot in world.slots]

    @property
    def own(self) -> Sequence[Own]:
        """Of a trainer that is started over what an earlier one left."""
        return (Own(rules=STANDING, judge=self._standing), Own(rules=UNLIKE, judge=self._unlike))

    def load(self, cause: int) -> LoadTrainer:
        return LoadTrainer(
            cause=cause,
            model=self._world.spec,
            actor=self._actor.ref,
            reference=None,
            gradients=self._arena,
            prefix_gradients=self._prefix_arena,
            optimizer_state=self._states,
            algorithm=ALGORITHM,
            optimizer=OPTIMIZER,
        )

    @cached_property
    def _ours(self) -> Weights:
        """What the trainer's weights should be when it has loaded."""
        return self._world.weights()

    def fill(self) -> None:
        """The prefix service's part: K and V, in a segment of which nothing else is 0."""
        world = self._world
        world.map(self._kv).write(0, b"\xff" * self._kv.size_bytes)
        state = prefix_forward(world.model(self._ours), world.batch(world.slots), grad=False)
        export_state(state, kv_views(world.map(self._kv), self._layout))

    def unit(self, cause: int, *, version: int, lease_bytes: int | None = None, step: int = 0) -> TrainSuffix:
        size = LEASE_BYTES if lease_bytes is None else lease_bytes
        sampled = tuple(
            Logprobs(group=group.group, values=np.full(sum(group.lengths), -3.0).tobytes()) for group in self._responses
        )
        return TrainSuffix(
            cause=cause,
            step=step,
            version=version,
            unit=0,
            suffix_unit=0,
            prompts=self._world.slots,
            copies=1,
            kv=self._kv,
            first=True,
            release=False,
            responses=self._responses,
            rollout_logprobs=sampled,
            reference_logprobs=(),
            rewards=tuple(rewards.tobytes() for rewards in self._rewards),
            batch_rewards=b"",
            workspace=LeaseRef(lease=3, kind=Kind.WORKSPACE, size_bytes=size),
            scratch=LeaseRef(lease=4, kind=Kind.WORKSPACE, size_bytes=size),
            return_logprobs=True,
        )

    def run(self, sitting: Sitting, sheet: Sheet) -> None:
        with sheet.case("filled", RULES):
            self._filled()
        with sheet.case("digest", RULES):
            ask_digest(sitting, self._actor)
        with sheet.case("logprobs", RULES):
            cause = sitting.tell(lambda c: self.unit(c, version=0))
            second = sitting.tell(lambda c: DigestRequest(cause=c))
            trained = sitting.answer(cause, SuffixTrained)
            sitting.answer(second, DigestReply)
            self._logprobs(trained)
        own: dict[str, Tensor] = {}
        with sheet.case("kv_gradients", RULES):
            own = self._kv_gradients()
        with sheet.case("vote", RULES):
            self._vote(sitting, own)
        states: list[tuple[State, int]] = []
        with sheet.case("update", RULES):
            self._update(sitting, states)
        with sheet.case("header", RULES):
            self._header(states)
        with sheet.case("skip", RULES):
            self._skip(sitting)
        with sheet.case("checkpoint", RULES):
            self._checkpoint(sitting)

    def _filled(self) -> None:
        try:
            header = self._actor.header.require(0)
        except RollplexError as error:
            raise Broken(str(error), "a header that says STABLE, version 0") from error
        if header.digest != self._ours.digest or self._actor.digest != header.digest:
            raise Violation(f"digest {header.digest}, of the bytes {self._actor.digest}", self._ours.digest)

    def _logprobs(self, trained: SuffixTrained) -> None:
        plain = self._world.model(self._ours, plain=True)
        if [part.group for part in trained.logprobs] != [group.group for group in self._responses]:
            raise Violation(f"log-probabilities of {len(trained.logprobs)} groups", "of each, in order")
        for told, group in zip(trained.logprobs, self._responses, strict=True):
            ours, values = self._world.logprobs(plain, group, TEMPERATURE), np.frombuffer(told.values, "<f8")
            apart = float(abs(values - ours).max()) if len(values) == len(ours) else float("nan")
            if not apart <= NUMBERS:
                raise Violation(f"{apart:.3g} from ours, in group {group.group}", f"at most {NUMBERS:g}")

    def _kv_gradients(self) -> dict[str, Tensor]:
        """Ours, of the loss up to a factor: -sum of advantage x log-probability; returns those of the parameters."""
        world = self._world
        own = {name: torch.zeros_like(value) for name, value in world.gradients(self._arena).items()}
        ref, layout = world.kv(len(world.slots))
        kv, found = kv_views(world.map(ref), layout), kv_views(world.map(self._kv), self._layout)
        model, batch = world.model(self._ours, gradients=own), world.batch(world.slots)
        export_state(prefix_forward(model, batch, grad=False), kv)
        tokens, lengths = response_batch(self._responses)
        out = suffix_forward(
            model,
            leaf_state(kv, batch.lengths, batch.next_positions),
            tokens,
            lengths,
            temperature=TEMPERATURE,
            never_sampled=world.spec.never_sampled,
        )
        advantages = torch.from_numpy(np.concatenate([r - r.mean() for r in self._rewards]))
        torch.autograd.backward(-(advantages[:, None] * out.logprobs * out.mask).sum())
        pairs = [*zip(found.d_keys, kv.d_keys, strict=True), *zip(found.d_values, kv.d_values, strict=True)]
        for layer, (got, needed) in enumerate(pairs):
            for row, slot in enumerate(world.slots):
                _alike(got[row, :, : slot.tokens], needed[row, :, : slot.tokens], f"K or V, {layer=}, prompt {row}")
        _alike(found.d_last_hidden, kv.d_last_hidden, "the last hidden state")
        return own

    def _vote(self, sitting: Sitting, own: dict[str, Tensor]) -> None:
        before = self._actor.digest
        vote = sitting.ask(lambda c: PrepareUpdate(cause=c, step=0, version=0), UpdateVote)
        if not vote.finite:
            raise Broken("finite: false", "true")
        if self._actor.digest != before:
            raise Violation("other weights than before", "no change before ApplyUpdate")
        got = self._world.gradients(self._arena)
        flat = torch.cat([got[name].flatten() for name in own])
        _alike(flat, torch.cat([own[name].flatten() for name in own]), "all parameters")

    def _update(self, sitting: Sitting, states: list[tuple[State, int]]) -> None:
        """states: gets those that the header goes through."""
        before = {name: value.clone() for name, value in self._actor.tensors.items()}
        step = {name: value.clone() for name, value in self._world.gradients(self._arena).items()}

        def look() -> bool:
            header = self._actor.header.read()
            if not states or states[-1] != (header.state, header.version):
                states.append((header.state, header.version))
            return (header.state, header.version) != (State.STABLE, 0)

        cause = sitting.tell(lambda c: ApplyUpdate(cause=c, step=0, version=0))
        end_s = time.monotonic() + sitting.limits.answer_s
        while not look() and not sitting.of(cause, UpdateApplied) and time.monotonic() < end_s:
            sitting.line.turn(0.0)
            if sitting.program.exit_code is not None:
                break
        applied = sitting.answer(cause, UpdateApplied)
        look()
        if (applied.version, applied.digest) != (1, self._actor.digest):
            raise Violation(f"version {applied.version}, digest {applied.digest}", f"1, {self._actor.digest}")
        for name, value in self._actor.tensors.items():
            if name in step:
                moved, needed = value - before[name], -LEARNING_RATE * step[name]
                close_enough(moved.double().numpy(), needed.double().numpy(), f"the step of {name}", 0.02)

    def _header(self, states: list[tuple[State, int]]) -> None:
        right = [(State.STABLE, 0), (State.UPDATING, 0), (State.STABLE, 1)]
        words = ", ".join(f"{state.name} {version}" for state, version in states)
        order = [right.index(state) for state in states if state in right]
        if len(order) != len(states) or order != sorted(order):
            raise Violation(words, "STABLE 0, UPDATING 0, STABLE 1")
        try:
            header = self._actor.header.require(1)
        except RollplexError as error:
            raise Violation(str(error), "STABLE, version 1") from error
        if header.digest != self._actor.digest:
            raise Violation(f"digest {header.digest}", f"that of the bytes, {self._actor.digest}")

    def _skip(self, sitting: Sitting) -> None:
        before = self._actor.digest
        sitting.ask(lambda c: self.unit(c, version=1, step=1), SuffixTrained)
        for value in self._world.gradients(self._prefix_arena).values():
            value.fill_(float("nan"))
        vote = sitting.ask(lambda c: PrepareUpdate(cause=c, step=1, version=1), UpdateVote)
        if vote.finite:
            raise Broken("finite: true, with an arena of NaN", "false")
        sitting.ask(lambda c: SkipUpdate(cause=c, step=1), UpdateSkipped)
        header = self._actor.header.require(1)
        if self._actor.digest != before or header.digest != before:
            raise Violation("other weights than before", "no change")

    def _checkpoint(self, sitting: Sitting) -> None:
        folder = self._world.scratch / f"checkpoints-{self._actor.ref.segment}" / "step_1"
        folder.parent.mkdir()
        saved = sitting.ask(
            lambda c: SaveCheckpoint(cause=c, step=1, version=1, folder=str(folder), state_json="{}"), CheckpointSaved
        )
        others = sorted(path.name for path in folder.parent.iterdir() if path.name not in {folder.name, LATEST})
        if not folder.is_dir() or saved.folder != str(folder) or others:
            raise Violation(f"{saved.folder}, beside {others}", f"{folder} alone")
        try:
            manifest = verify(folder)
            found = self._world.weights(filled=False)
            self._world.fill_from(found, folder)
        except (RollplexError, OSError) as error:
            raise Violation(str(error), "a folder that from_pretrained opens, with a manifest") from error
        version = manifest.identity.version
        if version != 1 or found.digest != self._actor.digest:
            raise Violation(f"version {version}, {found.digest}", f"version 1, {self._actor.digest}")

    # --- a start over what stands ---------------------------------------------------------------------------------

    def _standing(self, sitting: Sitting, sheet: Sheet) -> None:
        standing = self._leave()
        sitting.join()
        with sheet.case("standing", STANDING):
            before = self._left_state()
            sitting.ask(lambda c: self._load_over(c, standing), Loaded)
            self._require_left(standing)
            if self._left_state() != before:
                raise Violation("another optimizer state", "the earlier trainer's")
            if any(value.any() for value in self._world.gradients(self._arena).values()):
                raise Violation("gradients of the earlier trainer", "none")
            self.fill()
            sitting.ask(lambda c: self.unit(c, version=LEFT_VERSION), SuffixTrained)
            sitting.ask(lambda c: PrepareUpdate(cause=c, step=0, version=LEFT_VERSION), UpdateVote)
            applied = sitting.ask(lambda c: ApplyUpdate(cause=c, step=0, version=LEFT_VERSION), UpdateApplied)
            found, needed = (applied.version, self._steps()), (LEFT_VERSION + 1, LEFT_STEPS + 1)
            if found != needed:
                raise Violation(f"version, step {found}", f"version, step {needed}")

    def _unlike(self, sitting: Sitting, sheet: Sheet) -> None:
        standing = self._leave()
        sitting.join()
        with sheet.case("standing_refused", UNLIKE):
            other = replace(standing, digest=standing.digest[::-1])
            sitting.failure(sitting.tell(lambda c: self._load_over(c, other)), forbidden=(Loaded,))
            self._require_left(standing)

    def _leave(self) -> Standing:
        """What an earlier trainer of the run leaves: other weights than the folder's, moments, and gradients."""
        self._world.fill(self._actor, seed=LEFT_VERSION)
        self._actor.initialise(LEFT_VERSION)
        table = optimizer_table(self._world.table, name=LEFT_OPTIMIZER.name, momentum=0.0)
        self._states = self._world.create(Kind.OPTIMIZER_STATE, table.total_bytes)
        views = optimizer_views(self._world.map(self._states), table)
        views.step.fill_(LEFT_STEPS)
        for kind in views.states.values():
            for value in kind.values():
                value.fill_(1.0)
        for value in self._world.gradients(self._arena).values():
            value.fill_(1.0)
        return Standing(version=LEFT_VERSION, digest=self._actor.digest)

    def _load_over(self, cause: int, standing: Standing) -> LoadTrainer:
        return replace(self.load(cause), standing=standing, optimizer=LEFT_OPTIMIZER)

    def _left_state(self) -> bytes:
        return self._world.map(self._states).read(0, self._states.size_bytes)

    def _require_left(self, standing: Standing) -> None:
        header = self._actor.header.read()
        words = f"{header.state.name} {header.version}, digest {self._actor.digest}, {self._steps()} steps"
        needed = f"{State.STABLE.name} {LEFT_VERSION}, digest {standing.digest}, {LEFT_STEPS} steps"
        if words != needed:
            raise Violation(words, needed)

    def _steps(self) -> int:
        return int.from_bytes(self._world.map(self._states).read(STEP_OFFSET, 8), "little")


def _alike(got: Tensor, needed: Tensor, what: str) -> None:
    """Raises Violation: not the same up to a factor above 0."""
    a: NDArray[np.float64] = got.detach().double().numpy().ravel()
    b: NDArray[np.float64] = needed.detach().double().numpy().ravel()
    cosine = float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-30))
    if not cosine >= COSINE:
        raise Violation(f"a gradient of {what} in another direction: cosine {cosine:.6f}", f"at least {COSINE}")
