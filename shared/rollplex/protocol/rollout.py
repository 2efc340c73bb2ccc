"""The channel between the coordinator and a rollout service."""

from __future__ import annotations

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
    Name,
    Parallel,
    PromptSlot,
    Received,
    Responses,
    Seconds,
    SegmentRef,
)


class Sampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn. Draw = inverse CDF in fp64 in id order at a counter-based uniform number."""

    seed: Count
    purpose: Name
    """Part of the random key, so that evaluation and training never share a draw: "train" or "eval:<name>"."""
    group_size: Count
    max_new_tokens: Count
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)]
    """0 is greedy; the reported log-probability is then that of temperature 1."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Count = 0
    """0 is off."""
    stop_ids: Annotated[tuple[Count, ...], Meta(max_length=MAX_ITEMS)] = ()
    forced_lengths: Annotated[tuple[Count, ...], Meta(max_length=MAX_ITEMS)] = ()
    """For benches and tests: sample s of group g gets length forced_lengths[(g * group_size + s) % len] whatever it
    samples. Empty is off."""

    @property
    def longest_response(self) -> int:
        """Tokens that a response can have."""
        return max(self.forced_lengths, default=self.max_new_tokens)


class EngineSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which engine samples, and how large it may become. Numbers other than the name are for engines that keep a pool
    of K/V for the whole run; 0 where they do not apply."""

    name: Name = "transformers"
    """transformers, sglang or replay."""
    kv_tokens: Count = 0
    """Tokens that the pool of K/V holds."""
    max_running: Count = 0
    """Responses decoded at the same time, at most."""
    context_tokens: Count = 0
    """Longest prompt with its response."""
    prefill_tokens: Count = 0
    """Tokens of one prefill step."""
    private_bytes: Count = 0
    """Private memory of the engine's process beside the pool: more is refused by its allocator. 0: no limit."""
    decode_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Share of the device's multiprocessors that decoding keeps to."""
    seed: Count = 0
    replay: Name = ""
    """For the replay engine: file of recorded responses."""
    replay_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.0
    """For the replay engine: seconds over which the ends of a unit's groups are spread."""
    own_weights: bool = False
    """SGLang holds a copy of its own of the weights and copies each committed version into it."""


# coordinator -> rollout, once: map the weights. Answer: Loaded.
class LoadRollout(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    model: ModelSpec
    actor: SegmentRef
    engine: EngineSpec = EngineSpec()
    parallel: Parallel = Parallel()


# coordinator -> rollout: sample these prompts together, in this one decode batch, from exactly `version`.
# Answers: Prefilled, from engines that can tell; GroupFinished for each group as soon as its last sample stops; then
# UnitGenerated.
class GenerateUnit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    version: Count
    unit: Count
    inputs: SegmentRef
    prompts: Annotated[tuple[PromptSlot, ...], Meta(max_length=MAX_ITEMS)]
    sampling: Sampling
    kv: LeaseRef


# rollout -> coordinator: every prompt of the unit has its first token; what follows is decoding. Need not be sent: with
# device.window: decode prefix work then waits for the end of the unit.
class Prefilled(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    unit: Count
    end_s: Seconds


# rollout -> coordinator
class GroupFinished(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    version_start: Count
    version_end: Count
    """The weights version read from the segment's header before the first and after the last token."""
    responses: Responses
    logprobs: Logprobs
    stopped: Annotated[tuple[bool, ...], Meta(max_length=MAX_ITEMS)]
    """Per sample: ended by a stop id (else by max_new_tokens)."""
    end_s: Seconds


# rollout -> coordinator: the unit's K/V is given back.
class UnitGenerated(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    unit: Count
    start_s: Seconds
    prefill_end_s: Seconds
    end_s: Seconds
    """CLOCK_MONOTONIC, seconds."""
    decode_steps: Count
    vision_prompts: Count
    """Prompts that went through the vision tower in this unit."""
    held: Holdings
    """Private memory at the unit's peak."""


ToRollout: TypeAlias = LoadRollout | GenerateUnit | Drain | Committed | DigestRequest | Leave
FromRollout: TypeAlias = (
    Received
    | Alive
    | Leaving
    | Failed
    | Loaded
    | Prefilled
    | GroupFinished
    | UnitGenerated
    | Drained
    | CachesDropped
    | DigestReply
)
