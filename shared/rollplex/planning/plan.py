"""What a plan of memory says: `rollplex plan --json`. Bytes are of one device unless a field says otherwise."""

from __future__ import annotations

from msgspec import Struct


class PhaseHeld(Struct, frozen=True, kw_only=True):
    """One phase of one device. Bytes are those of the minimum: units that can wait do so, the largest is there."""

    phase: str
    by_kind: dict[str, int]
    bytes: int
    ample_bytes: int
    """With this nothing waits."""


class Cause(Struct, frozen=True, kw_only=True):
    """One of the largest blocks of a peak."""

    kind: str
    owner: str
    purpose: str
    bytes: int


class DeviceHeld(Struct, frozen=True, kw_only=True):
    """Devices that are alike."""

    what: str
    devices: tuple[int, ...]
    phases: tuple[PhaseHeld, ...]
    """LOAD and those of an iteration; EVAL if there are evaluations."""
    peak_bytes: int
    peak_phase: str
    causes: tuple[Cause, ...]
    ample_bytes: int
    fits: bool


class Largest(Struct, frozen=True, kw_only=True):
    """0: not even the smallest fits. Each with everything else as it was asked."""

    prompt_tokens: int
    """Of the longest prompt; its media stay the same."""
    batch: int
    """Prompts of a prefix batch, or whole sequences of a backward."""
    batch_limit: int
    """As many as there are in an iteration: a batch cannot be larger."""
    batch_of: str


class PlacementHeld(Struct, frozen=True, kw_only=True):
    """One placement; `refused`: why it cannot be, and then nothing else."""

    name: str
    refused: str = ""
    devices: tuple[DeviceHeld, ...] = ()
    host_bytes: int = 0
    """Of host memory, at the peak."""
    fits: bool = False
    largest: Largest | None = None
    assumptions: tuple[str, ...] = ()


class Weights(Struct, frozen=True, kw_only=True):
    """Of one device under Rollplex. Aliased, refreshed and rebuilt: of the rollout shard."""

    training_bytes: int
    rollout_bytes: int
    stored_bytes: int
    aliased_bytes: int
    refreshed_bytes: int
    rebuilt_bytes: int
    unsplit_bytes: int
    """On every rank whole: norms, the patch embedding, biases behind columns."""
    aliased_share: float


class Plan(Struct, frozen=True, kw_only=True):
    """The answer to a question."""

    model: str
    dtype: str
    gpus: int
    hbm_bytes: int
    training_tp: int
    rollout_tp: int
    replicas: int
    engines: int
    prompts_per_iteration: int
    group_size: int
    prompt_tokens: int
    image_tokens: int
    response_tokens: int
    weights: Weights
    placements: tuple[PlacementHeld, ...]
