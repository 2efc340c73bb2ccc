"""An inputs segment as the input child writes it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace
from torch import Tensor

from rollplex.protocol.common import Kind, PromptSlot, SegmentRef
from support.segments import HostSegments
from support.tiny import Prompt


def write_inputs(segments: HostSegments, prompts: Sequence[Prompt]) -> tuple[list[PromptSlot], SegmentRef]:
    """The prompts' slots, with their places in the segment."""
    content = bytearray(64)

    def put(value: Tensor) -> int:
        offset = len(content)
        content.extend(value.contiguous().numpy().tobytes())
        content.extend(bytes(-len(content) % 64))
        return offset

    slots = []
    for prompt in prompts:
        start = put(prompt.pixels) if prompt.pixels is not None else 0
        media = tuple(replace(slot, offset=slot.offset + start) for slot in prompt.slot.media)
        places = {"ids_offset": put(prompt.ids), "positions_offset": put(prompt.positions), "media": media}
        slots.append(replace(prompt.slot, **places))
    ref = segments.create(Kind.INPUTS, len(content))
    segments.map_again(ref).write(0, bytes(content))
    return slots, ref
