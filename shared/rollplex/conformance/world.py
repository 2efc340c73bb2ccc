"""What a service under test is given, and what its numbers should be: a tiny model, two prompts, segments on this host.

Owns segments and their contents. What it computes is computed with `rollplex.model`: whole sequences through plain
transformers, and the split passes. Knows no messages but the references in them. Imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollplex.data.patches import Grid
from rollplex.data.positions import Medium, mrope_positions
from rollplex.layout.kv import KvLayout
from rollplex.layout.parameters import ParameterTable, gradient_table, parameter_table, reference_table
from rollplex.layout.shape import media_ids, read_shape
from rollplex.memory.digest import digest
from rollplex.memory.header import HeaderPage
from rollplex.memory.segment import Mapping, backend
from rollplex.memory.tensors import tensor, views
from rollplex.model.batch import PromptBatch, prompt_batch
from rollplex.model.build import Model, build
from rollplex.model.logprob import log_probabilities
from rollplex.model.weights import fill
from rollplex.model.whole import whole_hidden
from rollplex.presets import write_preset
from rollplex.protocol.common import Kind, MediaSlot, ModelSpec, PromptSlot, Responses, SegmentRef

RUN_ID = "conformance"
DTYPE = "float32"
NOISE = 0.05
SAMPLES = 3
_ALIGN = 64

__all__ = ["DTYPE", "SAMPLES", "Weights", "World"]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """One segment of weights, mapped here."""

    ref: SegmentRef
    mapping: Mapping
    header: HeaderPage
    table: ParameterTable

    @property
    def tensors(self) -> dict[str, Tensor]:
        return views(self.mapping, self.table)

    @property
    def digest(self) -> str:
        """Of the bytes as they are."""
        return digest(self.mapping, self.table)

    def initialise(self, version: int) -> None:
        """Say that they are filled."""
        self.header.initialise(version, self.digest)

    def update(self, seed: int) -> None:
        """Other weights, of the next version."""
        version = self.header.read().version
        self.header.begin_update(version)
        disturb(self.tensors, seed)
        self.header.publish(version + 1, self.digest)


class World:
    """Segments and numbers for one test.

    Args:
        folder: gets the model, or has it already.
        scratch: for files that a worker writes.
    """

    def __init__(self, folder: Path, scratch: Path) -> None:
        if not (folder / "config.json").exists():
            write_preset("tiny", folder)
        self.folder, self.scratch = folder, scratch
        self.shape = read_shape(folder)
        self.table = parameter_table(self.shape, dtype=DTYPE, freeze_vision=False)
        self.segments: dict[int, tuple[int, SegmentRef]] = {}
        self._backend = backend("host")
        self._mapped: dict[int, Mapping] = {}
        self._models: dict[tuple[int, bool], Model] = {}
        self.spec = ModelSpec(
            path=str(folder),
            dtype=DTYPE,
            freeze_vision=False,
            table_hash=self.table.hash,
            never_sampled=media_ids(self.shape),
        )
        self.inputs, self.slots = self._inputs()

    # --- segments -------------------------------------------------------------------------------------------------

    def create(self, kind: Kind, size_bytes: int) -> SegmentRef:
        """A new segment, all zero."""
        number = len(self.segments) + 1
        ref = SegmentRef(segment=number, kind=kind, size_bytes=size_bytes)
        self.segments[number] = (self._backend.create(size_bytes, f"conformance-{kind}"), ref)
        return ref

    def map(self, ref: SegmentRef) -> Mapping:
        """The segment in this process."""
        if ref.segment not in self._mapped:
            self._mapped[ref.segment] = self._backend.map(self.segments[ref.segment][0], ref.size_bytes)
        return self._mapped[ref.segment]

    def weights(self, *, filled: bool = True, seed: int = 0) -> Weights:
        """A segment for the actor's weights; filled: see `fill`."""
        ref = self.create(Kind.ACTOR_WEIGHTS, self.table.total_bytes)
        mapping = self.map(ref)
        header = HeaderPage(mapping, run_id=RUN_ID, table_hash=self.table.hash)
        made = Weights(ref=ref, mapping=mapping, header=header, table=self.table)
        if filled:
            self.fill(made, seed)
        return made

    def fill(self, weights: Weights, seed: int = 0) -> None:
        """From the folder, and then disturbed if there is a seed."""
        self.fill_from(weights, self.folder)
        if seed:
            disturb(weights.tensors, seed)

    def fill_from(self, weights: Weights, folder: Path) -> None:
        """From another folder. Raises ModelError if it cannot be read."""
        fill(self.table, weights.tensors, folder)

    @property
    def reference_bytes(self) -> int:
        """Of a segment of the reference's weights."""
        return reference_table(self.table).total_bytes

    def fill_reference(self, ref: SegmentRef, weights: Weights) -> None:
        """The weights of another segment."""
        for name, value in views(self.map(ref), reference_table(self.table)).items():
            value.copy_(weights.tensors[name])

    def arena(self) -> SegmentRef:
        """A segment for gradients."""
        return self.create(Kind.GRADIENTS, gradient_table(self.table).total_bytes)

    def gradients(self, ref: SegmentRef) -> dict[str, Tensor]:
        """Gradients by stored name, as they lie in an arena."""
        return views(self.map(ref), gradient_table(self.table))

    def kv(self, rows: int) -> tuple[SegmentRef, KvLayout]:
        """A segment for the K/V of the prompts' prefix unit."""
        layout = KvLayout(self.shape, rows, max(slot.tokens for slot in self.slots), DTYPE)
        return self.create(Kind.ACTOR_PREFIX_KV, layout.total_bytes), layout

    def close(self) -> None:
        """Give the descriptors back; mappings end with what looks at them."""
        self._models.clear()
        self._mapped.clear()
        for fd, _ in self.segments.values():
            os.close(fd)
        self.segments.clear()

    # --- numbers --------------------------------------------------------------------------------------------------

    def model(self, weights: Weights, *, plain: bool = False, gradients: dict[str, Tensor] | None = None) -> Model:
        """The model over a segment; plain: transformers' own. Without gradients the same one each time."""
        known = (weights.ref.segment, plain)
        if gradients is None and known in self._models:
            return self._models[known]
        made = build(
            self.folder, self.table, weights.tensors, gradients=gradients, freeze_vision=False, plain=plain, fused=False
        )
        if gradients is None:
            self._models[known] = made
        return made

    def batch(self, slots: Sequence[PromptSlot], copies: int = 1) -> PromptBatch:
        """Prompts as a model takes them."""
        mapping = self.map(self.inputs)
        return prompt_batch(
            lambda at, shape, dtype: tensor(mapping, at, shape, dtype), slots, self.shape.row_width, copies
        )

    def distributions(self, plain: Model, responses: Responses, temperature: float) -> list[NDArray[np.float64]]:
        """Per sample [R, vocab]: the log-probability of each id at each place, by the one definition."""
        batch = self.batch([next(slot for slot in self.slots if slot.group == responses.group)])
        tokens = np.frombuffer(responses.tokens, "<i4").astype(np.int64)
        out = []
        for response in np.split(tokens, np.cumsum(responses.lengths)[:-1]):
            with torch.no_grad():
                logits = (
                    whole_hidden(plain, batch, torch.from_numpy(response)) @ plain.lm_head.weight[: self.shape.vocab].T
                )
                rows = log_probabilities(logits, temperature=temperature, never_sampled=self.spec.never_sampled)
            out.append(rows.double().numpy())
        return out

    def logprobs(self, plain: Model, responses: Responses, temperature: float) -> NDArray[np.float64]:
        """Of all samples of a group, one after the other, by the one definition."""
        tokens = np.frombuffer(responses.tokens, "<i4")
        rows = np.concatenate(self.distributions(plain, responses, temperature))
        picked: NDArray[np.float64] = rows[np.arange(len(tokens)), tokens]
        return picked

    def responses(self, seed: int) -> tuple[Responses, ...]:
        """Made-up responses to both prompts, of several lengths."""
        draw = np.random.default_rng(seed)
        allowed = np.setdiff1d(np.arange(self.shape.vocab), self.spec.never_sampled)
        made = []
        for slot in self.slots:
            lengths = tuple(int(n) for n in draw.integers(2, 6, SAMPLES))
            tokens = draw.choice(allowed, sum(lengths)).astype("<i4")
            made.append(Responses(group=slot.group, lengths=lengths, tokens=tokens.tobytes()))
        return tuple(made)

    # --- inputs ---------------------------------------------------------------------------------------------------

    def _inputs(self) -> tuple[SegmentRef, tuple[PromptSlot, ...]]:
        """Two prompts: with a picture of 16 patches, and without."""
        shape, merge = self.shape, self.shape.vision.merge
        grid = Grid(frames=1, height=4, width=4)
        picture = [shape.image_id] * grid.tokens(merge)
        written = ([9, shape.vision_start_id, *picture, shape.vision_end_id, 12, 30], [11, 14, 70])
        content, slots = bytearray(), []

        def put(value: NDArray[np.generic]) -> int:
            content.extend(bytes(-len(content) % _ALIGN))
            content.extend(np.ascontiguousarray(value).tobytes())
            return len(content) - value.nbytes

        for group, ids in enumerate(written):
            media = [Medium(start=2, grid=grid)] if shape.image_id in ids else []
            ticks = shape.vision.tokens_per_second
            positions, after = mrope_positions(len(ids), media, merge=merge, tokens_per_second=ticks)
            pixels = np.random.default_rng(group).standard_normal((grid.rows, shape.row_width), np.float32)
            slots.append(
                PromptSlot(
                    group=group,
                    row=100 + group,
                    tokens=len(ids),
                    ids_offset=put(np.asarray(ids, np.int64)),
                    positions_offset=put(positions),
                    next_position=after,
                    media=tuple(MediaSlot(offset=put(pixels), frames=1, height=4, width=4) for _ in media),
                )
            )
        ref = self.create(Kind.INPUTS, len(content))
        self.map(ref).write(0, bytes(content))
        return ref, tuple(slots)


def disturb(tensors: dict[str, Tensor], seed: int) -> None:
    """Change every weight a little, the same way for one seed. Padding, which is 0, stays 0."""
    draw = torch.Generator().manual_seed(seed)
    for value in tensors.values():
        value.mul_(1.0 + NOISE * torch.randn(value.shape, generator=draw))
