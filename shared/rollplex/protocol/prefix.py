"""The channel between the coordinator and a prefix service."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from rollplex.protocol.common import (
    MAX_ITEMS,
    Alive,
    CachesDropped,
    Committed,
    Count,
    DigestReply,
    DigestRequest,
    Drain,
    Drained,
    Failed,
    Holdings,
    LeaseRef,
    Leave,
    Leaving,
    Loaded,
    Logprobs,
    ModelSpec,
    PromptSlot,
    Received,
    Responses,
    Seconds,
    SegmentRef,
)


class Which(StrEnum):
    """Whose weights a prefix forward uses."""

    REFERENCE = "reference"
    ACTOR = "actor"


# coordinator -> prefix, once. Answer: Loaded.
class LoadPrefix(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    model: ModelSpec
    actor: SegmentRef
    reference: SegmentRef | None
    """None: no KL term, no reference."""
    gradients: SegmentRef
    """This process's own gradient arena; zeroed here at the first backward of each step."""
    temperature: Annotated[float, Meta(gt=0.0, le=100.0)]


# coordinator -> prefix: run the prompts' prefix once, together. The actor's keeps its graph and writes K, V and the
# last hidden state into `kv`; the reference's stays private under `lease`. `copies` is 1, or the group size when
# prefixes are replicated. Answer: PrefixReady.
class PrefixForward(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    version: Count
    unit: Count
    which: Which
    inputs: SegmentRef
    prompts: Annotated[tuple[PromptSlot, ...], Meta(max_length=MAX_ITEMS)]
    copies: Count
    lease: LeaseRef
    """Private memory: the reference's K/V, or the actor's activations."""
    kv: SegmentRef | None
    """Segment for the actor's K/V and their gradients (`rollplex.layout.kv`); None for the reference."""


# prefix -> coordinator
class PrefixReady(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    unit: Count
    which: Which
    start_s: Seconds
    end_s: Seconds
    vision_prompts: Count
    held: Holdings


# coordinator -> prefix: reference log-probabilities of these groups' responses, together, against the reference
# K/V of prefix unit `unit`. Answer: SuffixScored.
class ScoreSuffix(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    unit: Count
    suffix_unit: Count
    responses: Annotated[tuple[Responses, ...], Meta(max_length=MAX_ITEMS)]
    workspace: LeaseRef
    release: bool
    """The last suffix unit of this prefix unit: drop the reference K/V."""


# prefix -> coordinator
class SuffixScored(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    suffix_unit: Count
    logprobs: Annotated[tuple[Logprobs, ...], Meta(max_length=MAX_ITEMS)]
    start_s: Seconds
    end_s: Seconds
    held: Holdings


# coordinator -> prefix: the trainer has left the gradients of K, V and the last hidden state in the unit's segment;
# run the backward into this process's arena, then drop graph and segment. Answer: PrefixBackwardDone.
class PrefixBackward(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    version: Count
    unit: Count


# prefix -> coordinator
class PrefixBackwardDone(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    unit: Count
    start_s: Seconds
    end_s: Seconds


ToPrefix: TypeAlias = (
    LoadPrefix | PrefixForward | ScoreSuffix | PrefixBackward | Drain | Committed | DigestRequest | Leave
)
FromPrefix: TypeAlias = (
    Received
    | Alive
    | Leaving
    | Failed
    | Loaded
    | PrefixReady
    | SuffixScored
    | PrefixBackwardDone
    | Drained
    | CachesDropped
    | DigestReply
)
