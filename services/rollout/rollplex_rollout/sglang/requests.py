"""From a unit to what SGLang is asked for, one request per response.

Owns: reading prompts out of the inputs segment, and every check that SGLang would answer with silence (expanded ids
without their pictures make a request that never ends). Does not know SGLang's classes, only the values that its
`async_generate` takes.

Ids come with one placeholder per merged patch, pictures as the processor's output: SGLang tokenizes nothing and
processes no image. Positions are ours too, so that a video's are those of the trainer. What must be checked is, for all
prompts of a unit, before any is sent; pixels are read when a prompt's turn comes, tens of megabytes each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rollplex.errors import EngineError
from rollplex.layout.shape import ModelShape
from rollplex.memory.segment import Mapping
from rollplex.memory.tensors import DTYPES, tensor
from rollplex.protocol.common import MediaSlot, PromptSlot
from rollplex.protocol.rollout import Sampling
from rollplex_rollout.engine import Unit
from rollplex_rollout.sglang.hooks import PICTURED

FIRST_CHUNK_THEN_EVERY = 32
"""Tokens between two chunks of a stream; the first token comes alone. Each chunk costs the rollout process a wake-up,
and nobody waits for a token."""

Images: TypeAlias = list[dict[str, Any]]
"""One processor's output for all media of a prompt, as SGLang takes it."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One response of one prompt."""

    rid: str
    """None is the beginning of another: SGLang aborts by beginnings."""
    input_ids: list[int]
    pictures: Callable[[], Images] | None
    """Reads the prompt's media out of the inputs segment, which must still be mapped; slow, for a thread beside. None:
    it has none, or an earlier request of the prompt brings them (`hooks.PICTURED`)."""
    sampling: dict[str, Any]
    limit: int
    """Tokens of the response, at most; exactly, if the unit forces lengths."""


class Requests:
    """Makes the requests of units for one model."""

    def __init__(self, shape: ModelShape, *, dtype: str, context_tokens: int) -> None:
        """context_tokens: of the longest prompt with its response that the engine takes."""
        self._shape = shape
        self._dtype = DTYPES[dtype]
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
    ) -> Callable[[], Images] | None:
        if not slot.media:
            self._check_text(slot, ids, positions, where)
            return None
        images, videos = self._by_kind(slot, ids, where)
        return lambda: self._output(inputs, slot, positions, images, videos)

    def _output(
        self,
        inputs: Mapping,
        slot: PromptSlot,
        positions: Tensor,
        images: Sequence[MediaSlot],
        videos: Sequence[MediaSlot],
    ) -> Images:
        output: dict[str, Any] = {
            "format": "processor_output",
            "mrope_positions": positions,
            "mrope_position_delta": torch.tensor([[slot.next_position - slot.tokens]]),
        }
        for slots, pixels, grid in (
            (images, "pixel_values", "image_grid_thw"),
            (videos, "pixel_values_videos", "video_grid_thw"),
        ):
            if slots:
                read = [self._pixels(inputs, medium) for medium in slots]
                output[pixels] = read[0] if len(read) == 1 else torch.cat(read)
                output[grid] = torch.tensor([frame for medium in slots for frame in _frames(medium)])
        if len(slot.media) == 1:
            output["hash"] = _picture_hash(output.get("pixel_values", output.get("pixel_values_videos")))
        return [output]

    def _pixels(self, inputs: Mapping, medium: MediaSlot) -> Tensor:
        """[rows, row_width] in the model's dtype, which the tower would round them to: half the bytes to send."""
        rows = tensor(inputs, medium.offset, (medium.rows, self._shape.row_width), torch.float32)
        return rows.to(self._dtype, copy=True)

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

    def _by_kind(self, slot: PromptSlot, ids: list[int], where: str) -> tuple[list[MediaSlot], list[MediaSlot]]:
        """The prompt's images and videos, told apart by their placeholders; each must have a run of its own."""
        runs = _runs(ids, (self._shape.image_id, self._shape.video_id))
        per_token = self._shape.vision.merge**2
        expected = [medium.rows // per_token for medium in slot.media]
        if [length for _, length in runs] != expected:
            raise EngineError(
                "A prompt's placeholders are not those of its media",
                got=f"runs of {[length for _, length in runs]}",
                needed=f"runs of {expected}",
                where=where,
            )
        kinds = [kind for kind, _ in runs]
        pairs = list(zip(kinds, slot.media, strict=True))
        return (
            [medium for kind, medium in pairs if kind == self._shape.image_id],
            [medium for kind, medium in pairs if kind == self._shape.video_id],
        )


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


def _frames(medium: MediaSlot) -> list[tuple[int, int, int]]:
    """One (1, height, width) per frame. The towers of both architectures attend within frames, but SGLang 0.5.17's
    Qwen2.5-VL takes a video's frames together in its blocks without windows; frame by frame it is the same tower."""
    return [(1, medium.height, medium.width)] * medium.frames


def _runs(ids: Sequence[int], marks: tuple[int, ...]) -> list[tuple[int, int]]:
    """(mark, length) of each unbroken run of a mark."""
    runs: list[tuple[int, int]] = []
    last: int | None = None
    for token in ids:
        if token not in marks:
            last = None
        elif token == last:
            runs[-1] = (token, runs[-1][1] + 1)
        else:
            runs.append((token, 1))
            last = token
    return runs


def _picture_hash(pixels: Any) -> int:
    """What SGLang tells one picture from another by, made once a prompt instead of once a response: 63 bits."""
    content = pixels.contiguous().view(torch.uint8).numpy()
    return int.from_bytes(sha256(content).digest()[:8], "big") >> 1  # processors have instructions for this one
