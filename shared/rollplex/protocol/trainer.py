"""The channel between the coordinator and a trainer service."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from rollplex.protocol.common import (
    MAX_ITEMS,
    Alive,
    Blob,
    Count,
    DigestReply,
    DigestRequest,
    Failed,
    Finite,
    Holdings,
    LeaseRef,
    Leave,
    Leaving,
    Loaded,
    Logprobs,
    ModelSpec,
    Name,
    NonNegative,
    Parallel,
    PromptSlot,
    Received,
    Responses,
    Seconds,
    SegmentRef,
)


class Loss(StrEnum):
    """The policy loss. Formulas and sources: `rollplex_trainer.losses`."""

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    DAPO = "dapo"
    RLOO = "rloo"
    GSPO = "gspo"


class Scale(StrEnum):
    """What advantages are divided by."""

    GROUP = "group"
    BATCH = "batch"
    NONE = "none"


class Algorithm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Advantages and loss."""

    loss: Loss
    scale_rewards: Scale
    clip_low: NonNegative
    clip_high: NonNegative
    kl: Name
    """k1, k2 or k3."""
    beta: NonNegative
    entropy_bonus: Finite
    temperature: Annotated[float, Meta(gt=0.0, le=100.0)]
    max_new_tokens: Count


class Optimizer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Optimizer and learning-rate schedule."""

    name: Name
    """adamw or sgd."""
    lr: NonNegative
    betas: tuple[NonNegative, NonNegative]
    eps: NonNegative
    momentum: NonNegative
    weight_decay: NonNegative
    max_grad_norm: NonNegative
    """0 is off."""
    schedule: Name
    """constant, linear or cosine."""
    warmup_steps: Count
    total_steps: Count
    final_lr_ratio: NonNegative
    streamed: bool = False
    """The state passes through the device in pieces while it is stepped; where it lies, its segment says."""


class Restore(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint whose manifest the coordinator has verified."""

    folder: Name
    version: Count
    digest: Name
    """Of the actor weights in it."""


class Standing(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an earlier trainer of the same run left in the segments: weights, reference and optimizer state."""

    version: Count
    digest: Name
    """Of the actor weights in this device's segment."""


class Target(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A segment of the actor weights on a device that only samples; this trainer copies each version into it."""

    actor: SegmentRef
    parallel: Parallel
    """Of the rollout there."""


class Shards(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Segments of other ranks that a trainer may read while they stand still. Empty: it is alone."""

    actors: Annotated[tuple[SegmentRef, ...], Meta(max_length=1024)] = ()
    """Actor weights of each device of the plan, in their order, its own included."""
    gradients: Annotated[tuple[SegmentRef, ...], Meta(max_length=1024)] = ()
    """Arenas of the ranks of its own tensor-parallel group, in their order."""
    states: Annotated[tuple[SegmentRef, ...], Meta(max_length=1024)] = ()
    """Optimizer states of the same."""
    targets: Annotated[tuple[Target, ...], Meta(max_length=1024)] = ()
    """What it fills beside its own segment."""


# coordinator -> trainer, once: fill the weights from the model folder (also the reference's), zero gradients and
# optimizer state, publish version 0. With `restore`, actor weights and optimizer state are then filled from that
# checkpoint and its version is published. Of several ranks each fills what it trains, and publishes nothing: Publish
# follows when all have. With `standing` nothing is filled: what the segments hold is gone on with, if its header and
# digest say that it is that; gradients are zeroed; no Publish follows. Answer: Loaded.
class LoadTrainer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    model: ModelSpec
    actor: SegmentRef
    reference: SegmentRef | None
    gradients: SegmentRef
    """The trainer's own arena."""
    prefix_gradients: SegmentRef
    """The prefix service's arena, added in this order: trainer's + prefix's."""
    optimizer_state: SegmentRef
    algorithm: Algorithm
    optimizer: Optimizer
    restore: Restore | None = None
    standing: Standing | None = None
    """Not together with `restore`."""
    parallel: Parallel = Parallel()
    shards: Shards = Shards()
    private_bytes: Count = 0
    """Private memory of this process, at most; its allocator refuses more. 0: no limit."""


# coordinator -> trainer: forward and backward of these groups' suffixes, together, against the prefix K/V in `kv`;
# leaves the gradients of K, V and the last hidden state there, adds the rest to its own arena.
# Answer: SuffixTrained. Suffix units come in the order of their ids.
class TrainSuffix(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    version: Count
    unit: Count
    suffix_unit: Count
    prompts: Annotated[tuple[PromptSlot, ...], Meta(max_length=MAX_ITEMS)]
    """All prompts of the prefix unit: they give the layout of `kv`."""
    copies: Count
    kv: SegmentRef
    first: bool
    """First suffix unit on this kv: zero its gradients before the backward."""
    release: bool
    """Last suffix unit on this kv: unmap it afterwards."""
    responses: Annotated[tuple[Responses, ...], Meta(max_length=MAX_ITEMS)]
    rollout_logprobs: Annotated[tuple[Logprobs, ...], Meta(max_length=MAX_ITEMS)]
    reference_logprobs: Annotated[tuple[Logprobs, ...], Meta(max_length=MAX_ITEMS)]
    """Empty without a reference."""
    rewards: Annotated[tuple[Blob, ...], Meta(max_length=MAX_ITEMS)]
    """Per group of `responses`: float64 [G]. All NaN: the group is skipped, its weight is 0."""
    batch_rewards: Blob
    """float64 of the whole step in order of group and sample; only when scale_rewards is batch, else empty."""
    workspace: LeaseRef
    """What the suffix graph may hold between forward and backward."""
    scratch: LeaseRef
    """Temporary logits inside the forward and inside the backward."""
    return_logprobs: bool = False
    """Answer with the log-probabilities; a training step has no use for them."""


# trainer -> coordinator
class SuffixTrained(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    suffix_unit: Count
    start_s: Seconds
    end_s: Seconds
    held: Holdings
    logprobs: Annotated[tuple[Logprobs, ...], Meta(max_length=MAX_ITEMS)] = ()
    """The trainer's own, per group, if they were asked for."""


# coordinator -> trainer: forward and backward of whole sequences, prompt and response together, through a model that
# splits, shares and caches nothing: the slow path that the fast one is held to. One response at a time; gradients are
# added to the trainer's own arena. Alone in its step: PrepareUpdate then leaves the prefix service's arena out, and
# whatever the vote, the step may only be skipped. Answer: WholeTrained.
class TrainWhole(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    version: Count
    inputs: SegmentRef
    """Unmapped afterwards."""
    prompts: Annotated[tuple[PromptSlot, ...], Meta(max_length=MAX_ITEMS)]
    """One per group of `responses`, in their order."""
    responses: Annotated[tuple[Responses, ...], Meta(max_length=MAX_ITEMS)]
    rollout_logprobs: Annotated[tuple[Logprobs, ...], Meta(max_length=MAX_ITEMS)]
    reference_logprobs: Annotated[tuple[Logprobs, ...], Meta(max_length=MAX_ITEMS)]
    """As in TrainSuffix, and so are the rewards."""
    rewards: Annotated[tuple[Blob, ...], Meta(max_length=MAX_ITEMS)]
    batch_rewards: Blob
    workspace: LeaseRef
    """What the graph of one sequence may hold between forward and backward."""
    scratch: LeaseRef
    """Temporary logits inside the forward and inside the backward."""


# trainer -> coordinator
class WholeTrained(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    start_s: Seconds
    end_s: Seconds
    held: Holdings
    logprobs: Annotated[tuple[Logprobs, ...], Meta(max_length=MAX_ITEMS)]


# coordinator -> trainer: every suffix and every prefix backward of the step is done. Sum the arenas in fixed order,
# apply the loss normaliser, clip, look for non-finite values. Weights stay as they are. Answer: UpdateVote.
class PrepareUpdate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    version: Count


# trainer -> coordinator
class UpdateVote(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    finite: bool
    start_s: Seconds
    end_s: Seconds
    metrics: Annotated[dict[Name, float], Meta(max_length=4096)]
    """TRL's names where TRL has the quantity. Sums over the step, in the order of suffix units."""


# coordinator -> trainer, between a vote that says finite and the update, if the configuration asks for it: write the
# gradient that was voted on, as `rollplex.layout.parameters.gradient_table` lays it out. Of several ranks only rank 0
# of replica 0 is asked; it reads the others' arenas. Answer: GradientsKept.
class KeepGradients(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    file: Name
    """Final path; written beside it under a temporary name and renamed."""


# trainer -> coordinator
class GradientsKept(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    size_bytes: Count


# coordinator -> trainer, after the journal has BEGIN on disk and every reader is drained: step in place, digest,
# publish version + 1 as the last store. Answer: UpdateApplied. Of several ranks each steps what it trains and leaves
# the weights unpublished: Publish follows when all have stepped.
class ApplyUpdate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    version: Count


# trainer -> coordinator
class UpdateApplied(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    version: Count
    digest: Name
    """Empty of several ranks: Published says it."""
    start_s: Seconds
    end_s: Seconds


# coordinator -> each of several trainer ranks, when all have filled (LoadTrainer) or stepped (ApplyUpdate) their
# shards: copy into this device's segment, and into its targets, what other ranks own, digest, publish `version` as the
# last store. Answer: Published.
class Publish(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    version: Count


# trainer -> coordinator
class Published(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    version: Count
    digest: Name
    """Of this device's segment (`rollplex.memory.digest`)."""
    refreshed_bytes: Count
    """Copied into storage that training and rollout share."""
    rebuilt_bytes: Count
    """Copied into storage that only a rollout reads, its own or a target."""
    start_s: Seconds
    end_s: Seconds


# coordinator -> trainer: the vote failed, or the step was for its gradients only (`rollplex verify`); drop them, the
# version stays. Answer: UpdateSkipped.
class SkipUpdate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count


# trainer -> coordinator
class UpdateSkipped(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count


# coordinator -> trainer: write a folder that from_pretrained opens, plus the optimizer state; the same files whatever
# the degrees are. Of several ranks only rank 0 of replica 0 is asked; it reads the others' segments. Answer:
# CheckpointSaved.
class SaveCheckpoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    version: Count
    folder: Name
    """Final path; written beside it under a temporary name and renamed."""
    state_json: Annotated[str, Meta(max_length=2**20)]
    """What the coordinator wants kept with it: data position, seed, fingerprints, configuration."""


# trainer -> coordinator
class CheckpointSaved(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    version: Count
    folder: Name
    size_bytes: Count


ToTrainer: TypeAlias = (
    LoadTrainer
    | TrainSuffix
    | TrainWhole
    | PrepareUpdate
    | KeepGradients
    | ApplyUpdate
    | Publish
    | SkipUpdate
    | SaveCheckpoint
    | DigestRequest
    | Leave
)
FromTrainer: TypeAlias = (
    Received
    | Alive
    | Leaving
    | Failed
    | Loaded
    | SuffixTrained
    | WholeTrained
    | UpdateVote
    | GradientsKept
    | UpdateApplied
    | Published
    | UpdateSkipped
    | CheckpointSaved
    | DigestReply
)
