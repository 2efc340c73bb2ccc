"""What the journal keeps: every event of a run as a typed, tagged struct, and its JSON form.

Owns the vocabulary that journal, event stream, metrics and history share. Knows nothing of SQLite, HTTP or of who
appends. Times called *_s are CLOCK_MONOTONIC seconds of the process that measured them. A phase is written by its name
(`Phase.name`), which outlives a change of the enum's numbers. A float that is not finite is kept as None: JSON has no
NaN.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct

from rollplex.errors import JournalError
from rollplex.protocol.common import MAX_ITEMS, Count, Device, ErrorReport, Kind, Name, Role


class UnitKind(StrEnum):
    """What one unit of work computed."""

    GENERATE = "generate"
    REFERENCE_PREFIX = "reference_prefix"
    ACTOR_PREFIX = "actor_prefix"
    SCORE = "score"
    SUFFIX = "suffix"
    PREFIX_BACKWARD = "prefix_backward"
    VOTE = "vote"
    """The gradients of the step, summed and looked at; one unit a step."""


class StopWhen(StrEnum):
    """When a requested stop takes effect."""

    AFTER_ITERATION = "after_iteration"
    NOW = "now"


Metrics: TypeAlias = dict[Name, float | None]
"""Name to value, TRL's names where TRL has the quantity; None is a value that was not finite."""
Command: TypeAlias = Annotated[tuple[Name, ...], Meta(max_length=MAX_ITEMS)]
Groups: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=MAX_ITEMS)]
"""Indices of groups within the step."""


# --- the run ------------------------------------------------------------------------------------------------------


# The coordinator has opened the journal. `boot_id` says between which events CLOCK_MONOTONIC may be compared.
class RunStarted(Struct, frozen=True, kw_only=True, tag=True):
    run: Name
    pid: Count
    host: Name
    boot_id: Name
    seed: Count
    schedule: Name
    share_prefix: bool
    config_digest: Name
    resumed: bool = False
    iterations_wanted: Count | None = None
    """How many it was started for (run.iterations is the learning-rate schedule's length); None in old journals."""


# The last event of an orderly end.
class RunEnded(Struct, frozen=True, kw_only=True, tag=True):
    run: Name
    exit_code: Count
    reason: Name


# Somebody asked the run to stop: "http", "SIGINT", "SIGTERM".
class StopRequested(Struct, frozen=True, kw_only=True, tag=True):
    when: StopWhen
    exit: bool
    source: Name


# A Rollplex error that ended a unit, a step or the run.
class ErrorRaised(Struct, frozen=True, kw_only=True, tag=True):
    error: ErrorReport
    phase: Name
    step: Count | None = None
    service: Name = ""
    group: Count | None = None
    log_path: Name = ""


# This journal replaces one that could not be read, which lies at `moved_to`. Always the first event, id 1.
class JournalReplaced(Struct, frozen=True, kw_only=True, tag=True):
    moved_to: Name
    why: Name


# --- services -----------------------------------------------------------------------------------------------------


# The run's GPU is found, and how its workers share it is settled. Not on host memory.
class DeviceReady(Struct, frozen=True, kw_only=True, tag=True):
    device: Device
    gpu: Count
    """As nvidia-smi counts."""
    uuid: Name
    name: Name
    driver: Name
    total_bytes: Count
    free_bytes: Count
    """Before anything of the run was there."""
    sharing_asked: Name
    sharing_used: Name
    """mps: at the same time; turns: by the driver's time slices."""
    why: Name = ""
    """Of a use that is not what was asked."""


# A process was started, or joined from outside (`pid` as it told).
class ServiceStarted(Struct, frozen=True, kw_only=True, tag=True):
    service: Name
    role: Role
    device: Device
    incarnation: Count
    pid: Count
    log_path: Name = ""


# A part of what lies between the coordinator's start and the first iteration is over. Stages may overlap.
class StageDone(Struct, frozen=True, kw_only=True, tag=True):
    name: Name
    """import (from the start of the process), device (until its workers can share it), processes, <role> process (from
    its start to its handshake), control API, data check, memory plan, load model, load <role> (from the order to its
    answer), import rewards."""
    start_s: float
    end_s: float


# The process has answered Loaded.
class ServiceReady(Struct, frozen=True, kw_only=True, tag=True):
    service: Name
    role: Role
    incarnation: Count


# The process is gone though nobody told it to leave. `how`: "exit code 1", "killed by SIGKILL".
class ServiceDied(Struct, frozen=True, kw_only=True, tag=True):
    service: Name
    role: Role
    incarnation: Count
    pid: Count
    how: Name
    phase: Name
    step: Count | None = None
    log_path: Name = ""


# The weights are filled, from the model folder or a checkpoint, and may be read.
class WeightsLoaded(Struct, frozen=True, kw_only=True, tag=True):
    version: Count
    digest: Name
    """As UpdateCommitted has it."""


# A worker died, fell silent or failed, and all workers are started again, because those of a device share its fate.
# What the run was doing then (iteration `step`, if any) is done again from its start, unless its update was committed.
class WorkersRestarting(Struct, frozen=True, kw_only=True, tag=True):
    number: Count
    """1 for the first restart of the run."""
    allowed: Count
    """run.restarts."""
    service: Name
    role: Role | None
    """None: not a worker, but what they use the GPU through."""
    error: ErrorReport
    phase: Name
    version: Count
    """Of the weights, which stay."""
    step: Count | None = None
    log_path: Name = ""


# All workers are back: new processes over the same weights and optimizer state. took_s: since WorkersRestarting, the
# pause before the start included.
class WorkersRestarted(Struct, frozen=True, kw_only=True, tag=True):
    number: Count
    version: Count
    digest: Name
    took_s: float
    step: Count | None = None


# Another program has a service's place. `replaced`: the one before it. From iteration `step` on; the weights stay those
# of `version`. took_s: that the run waited for it.
class ServiceSwapped(Struct, frozen=True, kw_only=True, tag=True):
    role: Role
    command: Command
    replaced: Command
    incarnation: Count
    step: Count
    version: Count
    took_s: float


# A program was to have a service's place and has not got it. `case`: of `rollplex conformance`, or `takeover`.
class SwapRefused(Struct, frozen=True, kw_only=True, tag=True):
    role: Role
    command: Command
    case: Name
    got: Name
    needed: Name


# --- one iteration ------------------------------------------------------------------------------------------------


# From `start_s` on the run is in `phase`, until the next event of this type.
class PhaseEntered(Struct, frozen=True, kw_only=True, tag=True):
    phase: Name
    start_s: float
    step: Count | None = None


# Rows of the dataset in the order of their groups; every token of the step is sampled from `version`.
class IterationStarted(Struct, frozen=True, kw_only=True, tag=True):
    step: Count
    version: Count
    rows: Annotated[tuple[Count, ...], Meta(max_length=MAX_ITEMS)]


# A service finished one unit of work, between start_s and end_s of its own clock reading.
class UnitDone(Struct, frozen=True, kw_only=True, tag=True):
    step: Count
    kind: UnitKind
    unit: Count
    service: Name
    start_s: float
    end_s: float
    groups: Groups = ()
    vision_prompts: Count = 0
    """Prompts that went through the vision tower in this unit."""
    decode_start_s: float | None = None
    """GENERATE: the prompts were prefilled and decoding began. None for other kinds and in older journals."""


# The last sample of a group stopped. lengths: tokens of each response.
class GroupFinished(Struct, frozen=True, kw_only=True, tag=True):
    step: Count
    group: Count
    row: Count
    lengths: Annotated[tuple[Count, ...], Meta(max_length=MAX_ITEMS)]
    end_s: float


# The reward child scored a group. mean, std: over the group's samples that have a reward.
class GroupRewarded(Struct, frozen=True, kw_only=True, tag=True):
    step: Count
    group: Count
    row: Count
    mean: float | None
    std: float | None
    start_s: float
    end_s: float


# By policy a group has weight 0 in this step: it has no reward.
class GroupSkipped(Struct, frozen=True, kw_only=True, tag=True):
    step: Count
    group: Count
    row: Count
    function: Name
    problem: Name
    detail: Name = ""


# The step is over; `version` is that of the weights now.
class IterationDone(Struct, frozen=True, kw_only=True, tag=True):
    step: Count
    version: Count
    metrics: Metrics


# An evaluation began; without an EvalDone of this name and step after it, it was interrupted and left no result.
class EvalStarted(Struct, frozen=True, kw_only=True, tag=True):
    step: Count
    version: Count
    name: Name
    rows: Count
    """How many rows it has."""


# Greedy responses to an evaluation's rows, sampled from `version`; weights unchanged.
class EvalDone(Struct, frozen=True, kw_only=True, tag=True):
    step: Count
    version: Count
    name: Name
    metrics: Metrics


# --- memory -------------------------------------------------------------------------------------------------------


# The ledger granted memory. segment: None for private memory.
class LeaseGranted(Struct, frozen=True, kw_only=True, tag=True):
    lease: Count
    kind: Kind
    owner: Name
    device: Device
    size_bytes: Count
    last_consumer: Name = ""
    segment: Count | None = None
    step: Count | None = None


# A request that does not fit now waits in the ledger's queue.
class LeaseWaiting(Struct, frozen=True, kw_only=True, tag=True):
    kind: Kind
    owner: Name
    device: Device
    size_bytes: Count
    free_bytes: Count
    step: Count | None = None


# The last consumer is done. held_bytes: what the owner measured at its peak, None where it did not measure.
class LeaseReleased(Struct, frozen=True, kw_only=True, tag=True):
    lease: Count
    kind: Kind
    owner: Name
    device: Device
    size_bytes: Count
    held_bytes: Count | None = None
    step: Count | None = None


# A phase ended: the most HBM that the run used in it, as the driver says, and what the books said at that moment.
class MemoryObserved(Struct, frozen=True, kw_only=True, tag=True):
    device: Device
    phase: Name
    used_bytes: Count
    """Since the run began: without what the driver and others had before."""
    segments_bytes: Count
    private_bytes: dict[Name, Count] = {}
    """Leased, by owner."""
    held_bytes: dict[Name, Count] = {}
    """By owner: what it measured itself under its private leases, at most, in the phase."""
    overhead_bytes: Count | None = None
    """What no lease covers, measured once when everything was loaded; None before."""
    difference_bytes: int = 0
    """used - leased - overhead."""
    step: Count | None = None


# --- the gate -----------------------------------------------------------------------------------------------------


# BEGIN: on disk before any weight changes. Without UpdateCommitted after it the weights are poisoned.
class UpdateBegin(Struct, frozen=True, kw_only=True, tag=True):
    step: Count
    version: Count
    """The version that the update starts from."""


# COMMIT: the weights are at `version` (one more than UpdateBegin's) and have this digest.
class UpdateCommitted(Struct, frozen=True, kw_only=True, tag=True):
    step: Count
    version: Count
    digest: Name
    """Of several devices that of their digests."""
    start_s: float
    end_s: float
    """Of the optimizer's step."""
    refreshed_bytes: Count = 0
    """Copied to other devices into storage that training and rollout share there, of all devices."""
    rebuilt_bytes: Count = 0
    """Copied to storage that only a rollout reads."""
    published_s: float | None = None
    """The last copy was done. None where there is one device."""


# The vote failed before BEGIN; the version stays.
class UpdateSkipped(Struct, frozen=True, kw_only=True, tag=True):
    step: Count
    version: Count
    reason: Name


# The folder is in place under its final name.
class CheckpointSaved(Struct, frozen=True, kw_only=True, tag=True):
    step: Count
    version: Count
    folder: Name
    size_bytes: Count


Durable: TypeAlias = UpdateBegin | UpdateCommitted | CheckpointSaved
"""Events that must be on disk before the run goes on."""

Event: TypeAlias = (
    RunStarted
    | RunEnded
    | StopRequested
    | ErrorRaised
    | JournalReplaced
    | DeviceReady
    | ServiceStarted
    | StageDone
    | ServiceReady
    | ServiceDied
    | WeightsLoaded
    | WorkersRestarting
    | WorkersRestarted
    | ServiceSwapped
    | SwapRefused
    | PhaseEntered
    | IterationStarted
    | UnitDone
    | GroupFinished
    | GroupRewarded
    | GroupSkipped
    | IterationDone
    | EvalStarted
    | EvalDone
    | LeaseGranted
    | LeaseWaiting
    | LeaseReleased
    | MemoryObserved
    | UpdateBegin
    | UpdateCommitted
    | UpdateSkipped
    | CheckpointSaved
)


class Record(Struct, frozen=True, kw_only=True):
    """An event as the journal holds it. The id is its place in the journal, without gaps."""

    id: int
    wall_s: float
    monotonic_s: float
    step: int | None
    event: Event


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Event)


def type_of(event: Event) -> str:
    """The tag under which the event is journalled: the name of its class."""
    return type(event).__name__


def step_of(event: Event) -> int | None:
    """The step that the event belongs to, or None."""
    step: int | None = getattr(event, "step", None)
    return step


def encode(event: Event) -> str:
    """The event as one line of JSON, {"type": ..., ...}. A phase must have been given by name.

    Characters that UTF-8 cannot carry (from file names that are not UTF-8) are written as backslash escapes: an event
    about an error must not fail for the error's own text.
    """
    assert isinstance(getattr(event, "phase", ""), str), f"{type_of(event)}: a phase is journalled as Phase.name"
    try:
        return _ENCODER.encode(event).decode()
    except UnicodeEncodeError:
        return _ENCODER.encode(_cleaned(msgspec.to_builtins(event))).decode()


def decode(payload: str | bytes) -> Event:
    """The event that `encode` wrote.

    Raises:
        JournalError: not an event of this version's vocabulary.
    """
    try:
        return _DECODER.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise JournalError(
            "an event in the journal cannot be read",
            got=str(payload[:200]),
            needed=f"an event of this version ({error})",
            do="Read this journal with the version of Rollplex that wrote it.",
        ) from error


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_cleaned(key): _cleaned(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(item) for item in value]
    return value
