"""Values and messages that more than one channel uses."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

MAX_BLOB_BYTES = 64 * 2**20
MAX_ITEMS = 65_536

Blob = Annotated[bytes, Meta(max_length=MAX_BLOB_BYTES)]
"""Raw little-endian numbers; the field's comment says which."""
Count = Annotated[int, Meta(ge=0, le=2**53)]
Text = Annotated[str, Meta(max_length=65_536)]
Name = Annotated[str, Meta(max_length=4_096)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]
"""A duration, or a moment of CLOCK_MONOTONIC (the same for all processes of a host). Never NaN."""
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
"""Neither NaN nor infinite."""
NonNegative = Annotated[float, Meta(ge=0.0, le=1e300)]


class Role(StrEnum):
    """Who speaks on a channel."""

    ROLLOUT = "rollout"
    PREFIX = "prefix"
    TRAINER = "trainer"
    INPUT = "input"
    REWARD = "reward"


class Kind(StrEnum):
    """What a lease is for (design: kinds and lifetimes)."""

    ACTOR_WEIGHTS = "actor_weights"
    REFERENCE_WEIGHTS = "reference_weights"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ROLLOUT_KV = "rollout_kv"
    REFERENCE_PREFIX_KV = "reference_prefix_kv"
    ACTOR_PREFIX_KV = "actor_prefix_kv"
    PREFIX_ACTIVATIONS = "prefix_activations"
    INPUTS = "inputs"
    WORKSPACE = "workspace"
    OVERHEAD = "overhead"


class Memory(StrEnum):
    """Where a segment's bytes lie (`rollplex.memory.segment.backend`)."""

    HOST = "host"
    CUDA = "cuda"


HOST_INDEX = 1024
"""Stands for the memory of a host beside the GPUs that its workers compute on: above every GPU's index."""


class Device(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, order=True):
    """Where a process computes. The index of a host without GPU is 0; of host memory beside a GPU, HOST_INDEX."""

    node: Count = 0
    index: Count = 0

    def __str__(self) -> str:
        return f"{self.node}:{'host' if self.index == HOST_INDEX else self.index}"


class SegmentRef(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names a segment; the receiver fetches its descriptor from the coordinator's holder (`rollplex.memory`)."""

    segment: Count
    kind: Kind
    size_bytes: Count
    memory: Memory = Memory.HOST


class LeaseRef(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A grant of private memory: the receiver may hold so much for this purpose until the lease ends."""

    lease: Count
    kind: Kind
    size_bytes: Count


class Held(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker really holds under one lease, measured by the worker."""

    lease: Count
    size_bytes: Count


Holdings = Annotated[tuple[Held, ...], Meta(max_length=MAX_ITEMS)]


class MediaSlot(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One image or video of a prompt inside the inputs segment.

    Pixel rows: float32 [frames * height * width, row_width], already in the order that the vision tower wants.
    """

    offset: Count
    frames: Count
    height: Count
    width: Count

    @property
    def rows(self) -> int:
        return self.frames * self.height * self.width


class PromptSlot(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt inside the inputs segment. Offsets are in bytes and 64-byte aligned.

    ids: int64 [tokens]. positions: int64 [3, tokens] (mrope: temporal, height, width). The response goes on at
    `next_position` in all three rows. Media are in the order of their placeholders.
    """

    group: Count
    """Index of the group within the step."""
    row: Count
    """Row of the fingerprinted dataset; also the prompt's id in random draws."""
    tokens: Count
    ids_offset: Count
    positions_offset: Count
    next_position: Count
    media: Annotated[tuple[MediaSlot, ...], Meta(max_length=1024)] = ()

    @property
    def media_rows(self) -> int:
        return sum(m.rows for m in self.media)


class Responses(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampled responses of one group. tokens: int32 of all samples, one after the other."""

    group: Count
    lengths: Annotated[tuple[Count, ...], Meta(max_length=MAX_ITEMS)]
    tokens: Blob


class Logprobs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log-probabilities of one group's response tokens. values: float64 of all samples, one after the other."""

    group: Count
    values: Blob


class ModelSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every process that computes must agree on about the model."""

    path: Name
    dtype: Name
    """float32, bfloat16 or float64 (tests)."""
    freeze_vision: bool
    table_hash: Name
    """Of the parameter table (`rollplex.layout`), so that two versions of the code cannot disagree silently."""
    never_sampled: Annotated[tuple[Count, ...], Meta(max_length=MAX_ITEMS)]
    """Ids outside the log-softmax: media, padding, and what the configuration adds."""
    threads: Count = 1
    deterministic: bool = True
    device: Memory = Memory.HOST
    """What it is computed on. A GPU is the only one that the process sees."""


class Parallel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a process stands where several devices work on one model. All defaults: one device.

    Its device's segment is planned for both degrees (`rollplex.layout.parallel.plan`). Ranks that split the same batch
    are a tensor-parallel group; groups of the same role with other batches are replicas of each other (of a rollout:
    engines).
    """

    training: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Tensor-parallel degree of trainer and prefix that the segment is planned for."""
    rollout: Annotated[int, Meta(ge=1, le=1024)] = 1
    """The same of the rollout."""
    device: Count = 0
    """Within the plan's devices (`rollplex.layout.parallel.degrees.group`)."""
    rank: Count = 0
    """Within its tensor-parallel group, whose size is its role's degree."""
    replica: Count = 0
    """Which of the groups of its role."""
    replicas: Annotated[int, Meta(ge=1, le=1024)] = 1
    meet: Name = ""
    """File through which all processes of the role find each other, once; empty: it is alone."""
    collective_s: Annotated[float, Meta(gt=0.0, le=7 * 24 * 3600.0)] = 600.0
    """Deadline of one collective, seconds."""

    @property
    def alone(self) -> bool:
        """Whether the segment is that of one device with the whole model, and nobody is met."""
        return self.training == self.rollout == self.replicas == 1


class ErrorReport(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `rollplex.errors.RollplexError` on the wire, with where in the run it happened."""

    kind: Name
    what: Text
    got: Text = ""
    needed: Text = ""
    do: Text = ""
    where: Text = ""
    traceback: Text = ""


# --- messages that every worker channel carries -------------------------------------------------------------------


# worker -> coordinator, at once, from the worker's message thread: the instruction `cause` arrived.
class Received(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count


# worker -> coordinator, every second, from the worker's message thread; `progress` moves only with the work.
class Alive(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    progress: Count


# worker -> coordinator: instruction `cause` could not be carried out; the worker ends after this message.
class Failed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    error: ErrorReport


# worker -> coordinator: the model is mapped and the worker is ready for units.
class Loaded(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    table_bytes: Count
    on_policy: bool = True
    """A rollout answers whether its tokens are sampled from the mapped weights; the gate refuses others."""
    private: Holdings = ()
    libraries: Annotated[dict[Name, Name], Meta(max_length=64)] = {}
    """A trainer answers with the versions of what decides its numbers; a resumption compares them."""
    digest: Annotated[str, Meta(max_length=64)] = ""
    """Of the actor weights: a trainer that is alone answers with it, since it publishes them as it loads."""


# coordinator -> reader: finish what you run, read the weights no more until Committed.
class Drain(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    version: Count


# reader -> coordinator: nothing of this process reads the weights.
class Drained(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    version: Count


# coordinator -> reader: the weights are at `version` now (unchanged if the update was skipped); drop what depends on
# the old ones.
class Committed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    version: Count


# reader -> coordinator: caches are dropped, the segment's header was read and shows `version`.
class CachesDropped(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    version: Count


# coordinator -> worker: digest the actor weights as you see them through your own mapping.
class DigestRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count


# worker -> coordinator
class DigestReply(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    version: Count
    digest: Name


# coordinator -> worker: end; no answer.
class Leave(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    reason: Name


# worker -> coordinator: the worker was told to end from outside (SIGTERM, `docker compose down`); the run stops.
class Leaving(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    reason: Name
