"""From a unit to what SGLang is asked for, one request per response.

Owns: reading prompts out of the inputs segment, and every check that SGLang would answer with silence (expanded ids
without their pictures make a request that never ends). Does not know SGLang's classes, only the values that its
`async_generate` takes.

Ids come with one placeholder per merged patch: SGLang tokenizes nothing and processes no image. Positions are ours too,
so that a video's are those of the trainer. What must be checked is, for all prompts of a unit, before any is sent.
Pixels stay in the segment, from which the scheduler process takes them (`pixels`); here they are read once, for a name,
when a prompt's turn comes: tens of megabytes each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from rollplex.errors import EngineError
from rollplex.layout.shape import ModelShape
from rollplex.memory.segment import Mapping
from rollplex.memory.tensors import tensor
from rollplex.protocol.common import MediaSlot, PromptSlot
from rollplex.protocol.rollout import Sampling
from rollplex_rollout.engine import Unit
from rollplex_rollout.sglang.hooks import PICTURED

FIRST_CHUNK_THEN_EVERY = 32
"""Tokens between two chunks of a stream; the first token comes alone. Each chunk costs the rollout process a wake-up,
and nobody waits for a token."""


@dataclass(frozen=True, kw_only=True)
class Medium:
    """One image or video of a prompt."""

    video: bool
    offset: int
    """Of its pixels in the inputs segment."""
    rows: int
    frames: tuple[tuple[int, int, int], ...]
    """Grids, as the tower takes them."""
    first: int
    """Of its placeholders among the prompt's ids."""
    last: int
    name: int
    """63 bits by which SGLang tells one picture from another: of all that its embedding and, after the same text, its
    keys and values depend on, so that prompts which begin with the same picture share them, and no others do."""


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """All of a prompt."""

    media: tuple[Medium, ...]
    """In the order of their placeholders."""
    positions: Tensor
    """int64 [3, tokens]."""
    position_delta: int
    """Of the response: the position of a token less its index."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One response of one prompt."""

    rid: str
    """None is the beginning of another: SGLang aborts by beginnings."""
    input_ids: list[int]
    pictures: Callable[[], Pictures] | None
    """Reads the prompt's media in the inputs segment, which must still be mapped; slow, for a thread beside. None: it
    has none, or an earlier request of the prompt tells of them (`hooks.PICTURED`)."""
    sampling: dict[str, Any]
    limit: int
    """Tokens of the response, at most; exactly, if the unit forces lengths."""


class Requests:
    """Makes the requests of units for one model."""

    def __init__(self, shape: ModelShape, *, context_tokens: int) -> None:
        """context_tokens: of the longest prompt with its response that the engine takes."""
        self._shape = shape
        self._context_tokens = context_tokens

    def make(self, unit: Unit, tag: str) -> list[list[Request]]:
        """By prompt, then sample.

        Args:
            tag: part of every request's id that no other unit of this engine has.

        Raises:
            EngineError: a prompt whose ids, media and positions do not fit together, or that is too long.
        """
        samples = unit.sampling.group_size
        limits = unit.limits().reshape(-1, samples)
        return [
            self._group(unit, index, [int(limit) for limit in limits[index]], tag) for index in range(len(unit.prompts))
        ]

    def _group(self, unit: Unit, index: int, limits: Sequence[int], tag: str) -> list[Request]:
        slot = unit.prompts[index]
        where = f"group {slot.group}, row {slot.row}"
        if slot.tokens < 1 or slot.tokens + max(limits) > self._context_tokens:
            raise EngineError(
                "A prompt and its response are longer than the engine was started for",
                got=f"{slot.tokens} + {max(limits)} tokens",
                needed=f"1 .. {self._context_tokens}",
                where=where,
            )
        ids: list[int] = tensor(unit.inputs, slot.ids_offset, (slot.tokens,), torch.int64).tolist()
        outside = [token for token in ids if not 0 <= token < self._shape.vocab]
        if outside:
            raise EngineError(
                "A prompt has an id outside the vocabulary",
                got=str(outside[0]),
                needed=f"0 .. {self._shape.vocab - 1}",
                where=where,
            )
        positions = tensor(unit.inputs, slot.positions_offset, (3, slot.tokens), torch.int64).clone()
        media = self._media(unit.inputs, slot, ids, positions, where)
        mark = PICTURED if media else ""
        return [
            Request(
                rid=f"{tag}{mark}-{index:06d}-{sample:06d}",
                input_ids=ids,
                pictures=None if sample else media,
                sampling=sampling_parameters(unit.sampling, limit),
                limit=limit,
            )
            for sample, limit in enumerate(limits)
        ]

    def _media(
        self, inputs: Mapping, slot: PromptSlot, ids: list[int], positions: Tensor, where: str
    ) -> Callable[[], Pictures] | None:
        if not slot.media:
            self._check_text(slot, ids, positions, where)
            return None
        runs = self._runs(slot, ids, where)
        return lambda: Pictures(
            media=tuple(
                self._medium(inputs, medium, run, positions) for medium, run in zip(slot.media, runs, strict=True)
            ),
            positions=positions,
            position_delta=slot.next_position - slot.tokens,
        )

    def _medium(self, inputs: Mapping, medium: MediaSlot, run: _Run, positions: Tensor) -> Medium:
        video = run.mark == self._shape.video_id
        frames = _frames(medium)
        steps = positions[:, run.first : run.first + run.length] - positions[:, run.first : run.first + 1]
        return Medium(
            video=video,
            offset=medium.offset,
            rows=medium.rows,
            frames=frames,
            first=run.first,
            last=run.first + run.length - 1,
            name=_name(
                repr((video, frames)).encode() + steps.numpy().tobytes(),
                inputs.view(medium.offset, medium.rows * self._shape.row_width * torch.float32.itemsize),
            ),
        )

    def _check_text(self, slot: PromptSlot, ids: list[int], positions: Tensor, where: str) -> None:
        marks = {self._shape.image_id, self._shape.video_id} & set(ids)
        if marks:
            raise EngineError("A prompt has placeholders but no media", got=f"ids {sorted(marks)}", where=where)
        if slot.next_position != slot.tokens or not bool((positions == torch.arange(slot.tokens)).all()):
            raise EngineError(
                "A prompt without media has other positions than 0, 1, 2, ...",
                got=f"{positions[0, :4].tolist()} ..., then {slot.next_position}",
                needed="the positions that SGLang gives to text",
                where=where,
            )

    def _runs(self, slot: PromptSlot, ids: list[int], where: str) -> list[_Run]:
        """The placeholders of each medium, which tell images from videos; each must have a run of its own."""
        runs = _runs(ids, (self._shape.image_id, self._shape.video_id))
        per_token = self._shape.vision.merge**2
        expected = [medium.rows // per_token for medium in slot.media]
        if [run.length for run in runs] != expected:
            raise EngineError(
                "A prompt's placeholders are not those of its media",
                got=f"runs of {[run.length for run in runs]}",
                needed=f"runs of {expected}",
                where=where,
            )
        return runs


def sampling_parameters(sampling: Sampling, limit: int) -> dict[str, Any]:
    """SGLang's sampling parameters of one response. Temperature 0 is greedy there too, with log-probabilities of
    temperature 1."""
    forced = bool(sampling.forced_lengths)
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "max_new_tokens": limit,
        "ignore_eos": forced,
        "stop_token_ids": None if forced else list(sampling.stop_ids),
        "no_stop_trim": True,
        "stream_interval": FIRST_CHUNK_THEN_EVERY,
    }


def _frames(medium: MediaSlot) -> tuple[tuple[int, int, int], ...]:
    """One (1, height, width) per frame. The towers of both architectures attend within frames, but SGLang 0.5.17's
    Qwen2.5-VL takes a video's frames together in its blocks without windows; frame by frame it is the same tower."""
    return ((1, medium.height, medium.width),) * medium.frames


@dataclass(kw_only=True)
class _Run:
    """An unbroken run of a placeholder among a prompt's ids."""

    mark: int
    first: int
    length: int


def _runs(ids: Sequence[int], marks: tuple[int, ...]) -> list[_Run]:
    runs: list[_Run] = []
    last: int | None = None
    for index, token in enumerate(ids):
        if token not in marks:
            last = None
        elif token == last:
            runs[-1].length += 1
        else:
            runs.append(_Run(mark=token, first=index, length=1))
            last = token
    return runs


def _name(form: bytes, pixels: memoryview) -> int:
    """Pixels alone would not do: blank pictures of other proportions, a film's frames beside each other, and a film at
    another rate have the same."""
    with pixels:
        found = sha256(form)  # processors have instructions for this one
        found.update(pixels)
        return int.from_bytes(found.digest()[:8], "big") >> 1
