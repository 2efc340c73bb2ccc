"""What the trainer's tests share: a tiny model's numbers, segments of this process, and a trainer service over them."""

from __future__ import annotations

import os
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
from rollplex.memory.segment import Mapping, backend
from rollplex.memory.tensors import kv_views, views
from rollplex.model.batch import PromptBatch, prompt_batch
from rollplex.model.build import build
from rollplex.model.prefix import PrefixState, export_state, prefix_backward, prefix_forward
from rollplex.protocol.common import (
    Kind,
    LeaseRef,
    Logprobs,
    ModelSpec,
    PromptSlot,
    Responses,
    SegmentRef,
)
from rollplex.protocol.trainer import Algorithm, LoadTrainer, Loss, Optimizer, Scale, TrainSuffix
from rollplex_trainer.service import TrainerService

VOCAB = 70
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    "pad_token_id": 69,
    "eos_token_id": 68,
    "bos_token_id": None,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "out_hidden_size": 16,
    "fullatt_block_indexes": [0],
    "window_size": 56,
}
SPECIAL: dict[str, Any] = {
    "image_token_id": 64,
    "video_token_id": 65,
    "vision_start_token_id": 66,
    "vision_end_token_id": 67,
}


class HostSegments:
    """What a worker's `Segments` is to a service, with segments that the test makes."""

    run_id = "test-run"

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._mapped: dict[int, Mapping] = {}
        self._backend = backend("host")

    def create(self, kind: Kind, size_bytes: int) -> SegmentRef:
        number = len(self._fds) + 1
        self._fds[number] = self._backend.create(size_bytes, f"test-{kind}")
        return SegmentRef(segment=number, kind=kind, size_bytes=size_bytes)

    def attach(self, ref: SegmentRef) -> Mapping:
        if ref.segment not in self._mapped:
            self._mapped[ref.segment] = self._backend.map(self._fds[ref.segment], ref.size_bytes)
        return self._mapped[ref.segment]

    def map_again(self, ref: SegmentRef) -> Mapping:
        """A second mapping of the same memory, as another process has it."""
        return self._backend.map(self._fds[ref.segment], ref.size_bytes)

    def detach(self, segment: int) -> None:
        self._mapped.pop(segment).close()

    @property
    def attached(self) -> set[int]:
        return set(self._mapped)

    def close(self) -> None:
        self._mapped.clear()
        for fd in self._fds.values():
            os.close(fd)


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
OPTIMIZER = Optimizer(
    name="adamw",
    lr=0.01,
    betas=(0.9, 0.95),
    eps=1e-8,
    momentum=0.0,
    weight_decay=0.1,
    max_grad_norm=1.0,
    schedule="constant",
    warmup_steps=0,
    total_steps=10,
    final_lr_ratio=1.0,
)
NEVER_SAMPLED = (64, 65, 66, 67, 69)
PROMPTS = ([3, 66, 64, 64, 64, 64, 67, 9], [11, 12, 13], [5, 66, 64, 67, 8, 66, 64, 64, 67, 1])
GRIDS: tuple[tuple[tuple[int, int, int], ...], ...] = (((1, 4, 4),), (), ((1, 2, 2), (1, 2, 4)))
"""Media of the prompts: (frames, height, width) in patches; 2 x 2 patches are one placeholder."""


@dataclass
class Prompt:
    slot: PromptSlot
    ids: Tensor
    positions: Tensor
    pixels: Tensor | None
    grids: Tensor | None
    kinds: Tensor
    """transformers' mm_token_type_ids of the prompt."""


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
        optimizer = msgspec.structs.replace(OPTIMIZER, **changes.get("optimizer", {}))
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
            ),
            actor=segments.create(Kind.ACTOR_WEIGHTS, self.table.total_bytes),
            reference=segments.create(Kind.REFERENCE_WEIGHTS, reference_table(self.table).total_bytes),
            gradients=segments.create(Kind.GRADIENTS, arena_bytes),
            prefix_gradients=segments.create(Kind.GRADIENTS, arena_bytes),
            optimizer_state=segments.create(Kind.OPTIMIZER_STATE, states.total_bytes),
            algorithm=self.algorithm,
            optimizer=optimizer,
        )
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
        single = [prompt_batch(batch_of(p), [p.slot], width, copies) for p in self.prompts]
        longest = max(batch.tokens for batch in single)
        pad = torch.nn.functional.pad
        pixels = [batch.pixel_rows for batch in single if batch.pixel_rows is not None]
        batch = PromptBatch(
            ids=torch.cat([pad(b.ids, (0, longest - b.tokens)) for b in single]),
            positions=torch.cat([pad(b.positions, (0, longest - b.tokens)) for b in single], 1),
            lengths=torch.cat([b.lengths for b in single]),
            next_positions=torch.cat([b.next_positions for b in single]),
            pixel_rows=torch.cat(pixels),
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
        )

    def prefix_backward(self, ref: SegmentRef, state: PrefixState) -> None:
        layout = KvLayout(self.shape, state.rows, state.keys[0].shape[2], self.table.dtype)
        kv = kv_views(self.segments.map_again(ref), layout)
        prefix_backward(state, kv.d_keys, kv.d_values, kv.d_last_hidden)

    def clear_prefix_arena(self) -> None:
        for gradient in self.prefix_gradients.values():
            gradient.zero_()
