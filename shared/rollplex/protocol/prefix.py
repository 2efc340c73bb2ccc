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
    Parallel,
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
    parallel: Parallel = Parallel()
    private_bytes: Count = 0
    """Private memory of this process, at most; its allocator refuses more. 0: no limit."""


class Activations(StrEnum):
    """What an actor prefix keeps between its forward and its backward."""

    KEEP = "keep"
    """Everything that autograd saves."""
    LAYERS = "layers"
    """The inputs of the layers; each layer's forward runs again in the backward."""
    RECOMPUTE = "recompute"
    """Nothing; the whole forward runs again right before the backward."""
    RECOMPUTE_LAYERS = "recompute_layers"
    """Nothing either; the forward that runs again keeps the inputs of the layers, so that each runs a third time."""

    @property
    def again(self) -> bool:
        """Whether the whole forward runs again."""
        return self in (Activations.RECOMPUTE, Activations.RECOMPUTE_LAYERS)

    @property
    def by_layers(self) -> bool:
        """Whether a graph has the inputs of the layers only."""
        return self in (Activations.LAYERS, Activations.RECOMPUTE_LAYERS)


# coordinator -> prefix: run the prompts' prefix once, together. The actor's writes K, V and the last hidden state into
# `kv` and keeps of its graph what `activations` says; the reference's stays private under `lease`. `copies` is 1, or
# the group size when prefixes are replicated. Answer: PrefixReady.
class PrefixForward(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    version: Count
    unit: Count
    which: Which
    inputs: SegmentRef
    prompts: Annotated[tuple[PromptSlot, ...], Meta(max_length=MAX_ITEMS)]
    copies: Count
    lease: LeaseRef | None
    """Private memory: the reference's K/V, or the actor's activations. None if nothing is kept."""
    kv: SegmentRef | None
    """Segment for the actor's K/V and their gradients (`rollplex.layout.kv`); None for the reference."""
    activations: Activations = Activations.KEEP
    share: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Share of the device's multiprocessors that this work keeps to: less than all while a rollout decodes."""


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
# run the backward into this process's arena, then drop graph and segment. Where nothing was kept, the forward runs
# again first, on the same prompts: their inputs stay where they are until then. Answer: PrefixBackwardDone.
class PrefixBackward(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    version: Count
    unit: Count
    workspace: LeaseRef | None = None
    """Private memory for what this instruction computes again; None if everything was kept."""


# prefix -> coordinator
class PrefixBackwardDone(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    unit: Count
    start_s: Seconds
    end_s: Seconds
    held: Holdings = ()


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
