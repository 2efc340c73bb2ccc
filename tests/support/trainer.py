"""What the trainer's tests share: a tiny model's numbers, segments of this process, and a trainer service over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from rollplex.layout.kv import KvLayout
from rollplex.layout.optimizer import optimizer_table
from rollplex.layout.parameters import gradient_table, parameter_table, reference_table
from rollplex.layout.shape import read_shape
from rollplex.memory.header import HeaderPage
from rollplex.memory.tensors import kv_views, views
from rollplex.model.batch import PromptBatch, prompt_batch
from rollplex.model.build import build
from rollplex.model.prefix import PrefixState, export_state, prefix_backward, prefix_forward
from rollplex.protocol.common import (
    Kind,
    LeaseRef,
    Logprobs,
    Memory,
    ModelSpec,
    Responses,
    SegmentRef,
)
from rollplex.protocol.trainer import (
    Algorithm,
    ApplyUpdate,
    LoadTrainer,
    Loss,
    PrepareUpdate,
    Scale,
    TrainSuffix,
    TrainWhole,
    UpdateApplied,
    UpdateVote,
)
from rollplex_trainer.service import TrainerService
from support.inputs import write_inputs
from support.optimizers import ADAMW
from support.segments import HostSegments
from support.tiny import NEVER_SAMPLED, PICTURE, PICTURES, WORDS, Prompt

ALGORITHM = Algorithm(
    loss=Loss.GRPO,
    scale_rewards=Scale.GROUP,
    clip_low=0.2,
    clip_high=0.2,
    kl="k3",
    beta=0.04,
    entropy_bonus=0.02,
    temperature=0.7,
    max_new_tokens=6,
)
PROMPTS = (PICTURE, WORDS, PICTURES)
"""Of unequal length."""


@dataclass
class Sampled:
    """One group's responses and what is known of them."""

    tokens: list[list[int]]
    rollout: list[list[float]]
    reference: list[list[float]]
    rewards: list[float]


LENGTHS = ((4, 1, 6), (2, 5, 3), (6, 6, 1))
REWARDS = ((1.0, 0.0, 0.25), (0.5, 0.5, 0.5), (0.0, 1.0, 1.0))
"""The second group has no spread."""


def sampled(group: int) -> Sampled:
    draw = np.random.Generator(np.random.Philox(group))
    lengths = LENGTHS[group]
    return Sampled(
        tokens=[draw.integers(0, 64, n).tolist() for n in lengths],
        rollout=[(-3 - draw.random(n)).tolist() for n in lengths],
        reference=[(-3 - draw.random(n)).tolist() for n in lengths],
        rewards=list(REWARDS[group]),
    )


class World:
    """One trainer service over host segments, and a prefix service's work done by hand in the same process."""

    def __init__(self, folder: Path, prompts: list[Prompt], segments: HostSegments, dtype: str, **changes: Any) -> None:
        self.folder = folder
        self.prompts = prompts
        self.segments = segments
        self.shape = read_shape(folder)
        self.algorithm = msgspec.structs.replace(ALGORITHM, **changes.get("algorithm", {}))
        freeze = changes.get("freeze_vision", False)
        self.table = parameter_table(self.shape, dtype=dtype, freeze_vision=freeze)
        optimizer = msgspec.structs.replace(ADAMW, **changes.get("optimizer", {}))
        states = optimizer_table(self.table, name=optimizer.name, momentum=optimizer.momentum)
        arena_bytes = gradient_table(self.table).total_bytes
        self.load = LoadTrainer(
            cause=1,
            model=ModelSpec(
                path=str(folder),
                dtype=dtype,
                freeze_vision=freeze,
                table_hash=self.table.hash,
                never_sampled=NEVER_SAMPLED,
                device=changes.get("memory", Memory.HOST),
            ),
            actor=segments.create(Kind.ACTOR_WEIGHTS, self.table.total_bytes),
            reference=segments.create(Kind.REFERENCE_WEIGHTS, reference_table(self.table).total_bytes),
            gradients=segments.create(Kind.GRADIENTS, arena_bytes),
            prefix_gradients=segments.create(Kind.GRADIENTS, arena_bytes),
            optimizer_state=segments.create(Kind.OPTIMIZER_STATE, states.total_bytes),
            algorithm=self.algorithm,
            optimizer=optimizer,
            restore=changes.get("restore"),
        )
        for ref in (self.load.gradients, self.load.optimizer_state):
            segments.map_again(ref).write(0, b"\xff" * ref.size_bytes)  # NaN, should loading trust them to be zero
        self.service = TrainerService(segments)
        self.send(self.load)
        own = segments.map_again(self.load.actor)
        self.weights = views(own, self.table)
        self.header = HeaderPage(own, run_id=segments.run_id, table_hash=self.table.hash)
        arena = segments.map_again(self.load.prefix_gradients)
        self.prefix_gradients = views(arena, gradient_table(self.table))
        self.gradients = views(segments.map_again(self.load.gradients), gradient_table(self.table))
        self.prefix_model = build(
            folder, self.table, self.weights, gradients=self.prefix_gradients, freeze_vision=freeze
        )

    def send(self, message: Any) -> Any:
        """The one answer to an instruction."""
        answers: list[Any] = []
        self.service.handle(message, answers.append)
        assert len(answers) == 1
        assert answers[0].cause == message.cause
        return answers[0]

    def prefix(self, copies: int = 1) -> tuple[SegmentRef, PrefixState]:
        """What a prefix service leaves: K, V and hidden states in a segment, and the graph."""

        def batch_of(prompt: Prompt) -> Callable[[int, tuple[int, ...], torch.dtype], Tensor]:
            def source(offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
                if dtype == torch.float32:
                    assert prompt.pixels is not None
                    row = offset // 4 // self.shape.row_width
                    return prompt.pixels[row : row + shape[0]]
                return prompt.ids if len(shape) == 1 else prompt.positions

            return source

        width = self.shape.row_width
        device = self.gradients[next(iter(self.gradients))].device
        single = [prompt_batch(batch_of(p), [p.slot], width, copies, device=device) for p in self.prompts]
        longest = max(batch.tokens for batch in single)
        pad = torch.nn.functional.pad
        pixels = [batch.pixel_rows for batch in single if batch.pixel_rows is not None]
        batch = PromptBatch(
            ids=torch.cat([pad(b.ids, (0, longest - b.tokens)) for b in single]),
            positions=torch.cat([pad(b.positions, (0, longest - b.tokens)) for b in single], 1),
            lengths=torch.cat([b.lengths for b in single]),
            next_positions=torch.cat([b.next_positions for b in single]),
            pixel_rows=torch.cat(pixels) if pixels else None,
            grids=tuple(grid for b in single for grid in b.grids),
            copies=copies,
            vision_prompts=0,
        )
        state = prefix_forward(self.prefix_model, batch, grad=True)
        layout = KvLayout(self.shape, batch.rows, batch.tokens, self.table.dtype)
        ref = self.segments.create(Kind.ACTOR_PREFIX_KV, layout.total_bytes)
        mapping = self.segments.map_again(ref)
        kv = kv_views(mapping, layout)
        kv.gradients.fill_(0xFF)  # NaN: whoever trusts a segment to come zeroed is found out
        export_state(state, kv)
        return ref, state

    def train_message(
        self,
        kv: SegmentRef,
        groups: list[Sampled],
        *,
        start: int = 0,
        unit: int = 0,
        copies: int = 1,
        first: bool = True,
        release: bool = True,
        version: int = 0,
    ) -> TrainSuffix:
        """Groups `start`, `start + 1`, ... in one suffix unit; the step is the version."""
        numbers = range(start, start + len(groups))
        pairs = list(zip(numbers, groups, strict=True))

        def values(rows: list[list[float]], group: int) -> Logprobs:
            return Logprobs(group=group, values=np.concatenate(rows).astype("<f8").tobytes())

        return TrainSuffix(
            cause=50 + unit,
            step=version,
            version=version,
            unit=0,
            suffix_unit=unit,
            prompts=tuple(prompt.slot for prompt in self.prompts),
            copies=copies,
            kv=kv,
            first=first,
            release=release,
            responses=tuple(
                Responses(
                    group=n,
                    lengths=tuple(map(len, g.tokens)),
                    tokens=np.concatenate(g.tokens).astype("<i4").tobytes(),
                )
                for n, g in pairs
            ),
            rollout_logprobs=tuple(values(g.rollout, n) for n, g in pairs),
            reference_logprobs=tuple(values(g.reference, n) for n, g in pairs),
            rewards=tuple(np.array(g.rewards).astype("<f8").tobytes() for g in groups),
            batch_rewards=b"",
            workspace=LeaseRef(lease=7, kind=Kind.WORKSPACE, size_bytes=2**20),
            scratch=LeaseRef(lease=8, kind=Kind.WORKSPACE, size_bytes=2**20),
        )

    def prefix_backward(self, ref: SegmentRef, state: PrefixState) -> None:
        layout = KvLayout(self.shape, state.rows, state.keys[0].shape[2], self.table.dtype)
        kv = kv_views(self.segments.map_again(ref), layout)
        prefix_backward(state, kv.d_keys, kv.d_values, kv.d_last_hidden)

    def clear_prefix_arena(self) -> None:
        for gradient in self.prefix_gradients.values():
            gradient.zero_()


def train_all(
    world: World, groups: list[Sampled], split: tuple[int, ...] = (3,), copies: int = 1, version: int = 0
) -> Any:
    """A whole step's suffix units (groups per unit: `split`) and prefix backward. Returns the last answer."""
    ref, state = world.prefix(copies)
    start, answer = 0, None
    for unit, size in enumerate(split):
        answer = world.send(
            world.train_message(
                ref,
                groups[start : start + size],
                start=start,
                unit=unit,
                copies=copies,
                first=unit == 0,
                release=unit == len(split) - 1,
                version=version,
            )
        )
        start += size
    world.clear_prefix_arena()
    world.prefix_backward(ref, state)
    return answer


def whole_message(world: World, groups: list[Sampled], version: int = 0) -> TrainWhole:
    """Groups 0, 1, ... as whole sequences; the step is the version."""
    ref, _ = world.prefix()
    like = world.train_message(ref, groups, version=version)
    slots, inputs = write_inputs(world.segments, world.prompts)
    return TrainWhole(
        cause=70,
        step=version,
        version=version,
        inputs=inputs,
        prompts=tuple(slots),
        responses=like.responses,
        rollout_logprobs=like.rollout_logprobs,
        reference_logprobs=like.reference_logprobs,
        rewards=like.rewards,
        batch_rewards=like.batch_rewards,
        workspace=LeaseRef(lease=17, kind=Kind.WORKSPACE, size_bytes=2**20),
        scratch=LeaseRef(lease=18, kind=Kind.WORKSPACE, size_bytes=2**20),
    )


def prepare(world: World, version: int = 0) -> UpdateVote:
    answer: UpdateVote = world.send(PrepareUpdate(cause=90, step=version, version=version))
    return answer


def apply(world: World, version: int = 0) -> UpdateApplied:
    answer: UpdateApplied = world.send(ApplyUpdate(cause=91, step=version, version=version))
    return answer
