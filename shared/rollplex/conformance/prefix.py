"""The cases of a prefix service: K, V and gradients against our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from rollplex.conformance.judging import close_enough
from rollplex.conformance.reading import READER, ask_digest, drain, take_over
from rollplex.conformance.sitting import Own, Sheet, Sitting, Violation
from rollplex.conformance.world import DTYPE, World
from rollplex.layout.kv import KvLayout
from rollplex.memory.predict import kv_bytes, prefix_activation_bytes
from rollplex.memory.tensors import KvViews, kv_views
from rollplex.model.prefix import prefix_backward, prefix_forward
from rollplex.protocol.common import DigestReply, DigestRequest, Held, Kind, LeaseRef, Role, SegmentRef
from rollplex.protocol.prefix import (
    LoadPrefix,
    PrefixBackward,
    PrefixBackwardDone,
    PrefixForward,
    PrefixReady,
    ScoreSuffix,
    SuffixScored,
    Which,
)

VERSION = 4
TEMPERATURE = 0.8
NUMBERS = 1e-3
"""How far numbers may lie from ours, relative to the largest; log-probabilities absolute."""
HELD = 1.05
WORKSPACE = LeaseRef(lease=9, kind=Kind.WORKSPACE, size_bytes=2**26)
REFERENCE_SEED, GRADIENT_SEED = 5, 6

RULES: Final = {
    "digest": READER["digest"],
    "keys_values": "K, V and the last hidden state of the actor are ours, within 1e-3",
    "scores": "log-probabilities under the reference are those of the definition, within 1e-3 of transformers'",
    "gradients": "PrefixBackward leaves our gradients in the arena, which is zeroed at the step's first",
    "held": "it holds no more than 5 % above its leases",
    "drained": READER["drained"],
    "committed": READER["committed"],
    "fresh": "after Committed it computes from the new weights, and the arena begins anew",
}


class PrefixKit:
    """A prefix service's instructions (`rollplex.conformance.cases.Kit`)."""

    role = Role.PREFIX
    rules: Mapping[str, str] = RULES
    unit_answer: type = PrefixReady
    version = VERSION
    own: Sequence[Own] = ()

    def __init__(self, world: World) -> None:
        self._world = world
        self._actor = world.weights(filled=False)
        self._reference_weights = world.weights(seed=REFERENCE_SEED)
        self._reference = world.create(Kind.REFERENCE_WEIGHTS, world.reference_bytes)
        self._arena = world.arena()
        world.map(self._arena).write(0, b"\xff" * self._arena.size_bytes)  # NaN, should it be trusted to be zero
        self._kv: tuple[SegmentRef, KvLayout] = world.kv(len(world.slots))

    def load(self, cause: int) -> LoadPrefix:
        return LoadPrefix(
            cause=cause,
            model=self._world.spec,
            actor=self._actor.ref,
            reference=self._reference,
            gradients=self._arena,
            temperature=TEMPERATURE,
        )

    def fill(self) -> None:
        self._world.fill(self._actor)
        self._world.fill_reference(self._reference, self._reference_weights)
        self._actor.initialise(VERSION)

    def unit(
        self, cause: int, *, version: int, lease_bytes: int | None = None, which: Which = Which.ACTOR, step: int = 2
    ) -> PrefixForward:
        actor = which is Which.ACTOR
        kind = Kind.PREFIX_ACTIVATIONS if actor else Kind.REFERENCE_PREFIX_KV
        size = self._lease_bytes(which) if lease_bytes is None else lease_bytes
        return PrefixForward(
            cause=cause,
            step=step,
            version=version,
            unit=0,
            which=which,
            inputs=self._world.inputs,
            prompts=self._world.slots,
            copies=1,
            lease=LeaseRef(lease=3 if actor else 4, kind=kind, size_bytes=size),
            kv=self._kv[0] if actor else None,
        )

    def run(self, sitting: Sitting, sheet: Sheet) -> None:
        world = self._world
        held: list[Held] = []
        with sheet.case("digest", RULES):
            ask_digest(sitting, self._actor)
        with sheet.case("keys_values", RULES):
            held += self._forward(sitting, VERSION, step=2, computing=True).held
            self._keys_values()
        with sheet.case("scores", RULES):
            reference = sitting.ask(lambda c: self.unit(c, version=VERSION, which=Which.REFERENCE), PrefixReady)
            held += reference.held
            self._scores(sitting)
        with sheet.case("gradients", RULES):
            self._backward(sitting, VERSION, step=2)
        with sheet.case("held", RULES):
            self._held(held)
        with sheet.case("drained", RULES):
            drain(sitting, VERSION)
        with sheet.case("committed", RULES):
            take_over(sitting, self._actor)
        with sheet.case("fresh", RULES):
            self._kv = world.kv(len(world.slots))
            self._forward(sitting, VERSION + 1, step=3)
            self._keys_values()
            self._backward(sitting, VERSION + 1, step=3)

    def _forward(self, sitting: Sitting, version: int, *, step: int, computing: bool = False) -> PrefixReady:
        cause = sitting.tell(lambda c: self.unit(c, version=version, step=step))
        second = sitting.tell(lambda c: DigestRequest(cause=c)) if computing else None
        ready = sitting.answer(cause, PrefixReady)
        if second is not None:
            sitting.answer(second, DigestReply)
        return ready

    def _views(self) -> KvViews:
        return kv_views(self._world.map(self._kv[0]), self._kv[1])

    def _keys_values(self) -> None:
        """Padding apart, whose numbers mean nothing."""
        world, found = self._world, self._views()
        ours = prefix_forward(world.model(self._actor), world.batch(world.slots), grad=False)
        for layer, (keys, values) in enumerate(zip(ours.keys, ours.values, strict=True)):
            for row, slot in enumerate(world.slots):
                for name, got, needed in (("K", found.keys, keys), ("V", found.values, values)):
                    real = slice(slot.tokens)
                    close_enough(
                        _numbers(got[layer][row, :, real]),
                        _numbers(needed[row, :, real]),
                        f"{name} of layer {layer}, prompt {row}",
                        NUMBERS,
                    )
        close_enough(_numbers(found.last_hidden), _numbers(ours.last_hidden), "the last hidden state", NUMBERS)

    def _scores(self, sitting: Sitting) -> None:
        world = self._world
        responses = world.responses(seed=1)
        scored = sitting.ask(
            lambda c: ScoreSuffix(
                cause=c, step=2, unit=0, suffix_unit=0, responses=responses, workspace=WORKSPACE, release=True
            ),
            SuffixScored,
        )
        plain = world.model(self._reference_weights, plain=True)
        if [part.group for part in scored.logprobs] != [part.group for part in responses]:
            raise Violation(f"groups {[part.group for part in scored.logprobs]}", "those of the instruction, in order")
        for told, group in zip(scored.logprobs, responses, strict=True):
            ours = world.logprobs(plain, group, TEMPERATURE)
            values = np.frombuffer(told.values, "<f8")
            apart = float(abs(values - ours).max()) if len(values) == len(ours) else float("nan")
            if not apart <= NUMBERS:
                raise Violation(f"{apart:.3g} from ours, in group {group.group}", f"at most {NUMBERS:g}")

    def _backward(self, sitting: Sitting, version: int, *, step: int) -> None:
        """Made-up gradients of K and V, as a trainer leaves them, and ours of the parameters."""
        world, found = self._world, self._views()
        draw = torch.Generator().manual_seed(GRADIENT_SEED + step)
        for part in (*found.d_keys, *found.d_values, found.d_last_hidden):
            part.copy_(torch.randn(part.shape, generator=draw))
        for row, slot in enumerate(world.slots):
            for part in (*found.d_keys, *found.d_values):
                part[row, :, slot.tokens :] = 0.0
        own = {name: torch.zeros_like(value) for name, value in world.gradients(self._arena).items()}
        state = prefix_forward(world.model(self._actor, gradients=own), world.batch(world.slots), grad=True)
        prefix_backward(state, found.d_keys, found.d_values, found.d_last_hidden)
        sitting.ask(lambda c: PrefixBackward(cause=c, step=step, version=version, unit=0), PrefixBackwardDone)
        for name, value in world.gradients(self._arena).items():
            close_enough(_numbers(value), _numbers(own[name]), f"the gradient of {name}", NUMBERS)

    def _held(self, held: list[Held]) -> None:
        leases = {3: self._lease_bytes(Which.ACTOR), 4: self._lease_bytes(Which.REFERENCE)}
        for part in held:
            if part.size_bytes > HELD * leases.get(part.lease, 0):
                raise Violation(
                    f"{part.size_bytes} bytes under lease {part.lease}", f"at most {leases.get(part.lease, 0)}"
                )

    def _lease_bytes(self, which: Which) -> int:
        world = self._world
        rows, tokens = len(world.slots), max(slot.tokens for slot in world.slots)
        if which is Which.REFERENCE:
            return kv_bytes(world.shape, rows=rows, tokens=tokens, dtype=DTYPE)
        grids = [(m.frames, m.height, m.width) for slot in world.slots for m in slot.media]
        return prefix_activation_bytes(
            world.shape, rows=rows, tokens=tokens, grids=grids, freeze_vision=False, dtype=DTYPE
        )


def _numbers(value: Tensor) -> np.ndarray:
    return value.detach().double().numpy()
