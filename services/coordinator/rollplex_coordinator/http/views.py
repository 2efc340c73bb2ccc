"""What the HTTP API shows and takes: frozen models, the single source of the OpenAPI document.

Owns names and units of the API's JSON. Knows nothing of how a value comes about.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, computed_field

from rollplex.journal.events import StopWhen
from rollplex.protocol.common import Kind, Role

MAX_COUNT = 1_000_000_000


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


MaybeFinite = Annotated[float | None, BeforeValidator(_finite)]
"""JSON has no NaN: a number that is not finite is shown as null."""


class View(BaseModel):
    """Base of all views."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_by_name=True, validate_by_alias=True
    )


# --- requests -----------------------------------------------------------------------------------------------------


class StartRequest(View):
    """Run more iterations."""

    count: Annotated[int, Field(strict=True, ge=1, le=MAX_COUNT)]
    """How many, on top of those already wanted."""


class SwapRequest(View):
    """Replace a service between two iterations."""

    command: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=4_096)], ...], Field(min_length=1)]
    """The program and its arguments; `--run-dir DIR --device NODE:INDEX --incarnation N` follow."""


class StopRequest(View):
    """Stop iterating."""

    when: StopWhen
    """after_iteration: the iteration that runs is finished. now: it is given up, unless its update has begun."""
    exit: Annotated[bool, Field(strict=True)] = True
    """True: the run ends, with exit code 0. False: it waits for the next start."""


class Nothing(View):
    """A request that needs no more than its address."""


# --- the run ------------------------------------------------------------------------------------------------------


class WaitView(View):
    """Something that the coordinator waits for."""

    awaited: Annotated[str, Field(validation_alias="for", serialization_alias="for")]
    """What."""
    source: Annotated[str, Field(validation_alias="from", serialization_alias="from")]
    """From whom."""
    age_s: Annotated[float, Field(ge=0)]
    """For how long, by a clock that only goes forward."""
    since_wall_s: float
    """Since when, as seconds since 1970; for reading only."""
    deadline_s: Annotated[float, Field(ge=0)]
    """The wait is an error at this age, unless the peer makes progress."""


class GpuView(View):
    """A GPU of the run."""

    device: str
    """As services are named by it."""
    name: str
    """Its number, name and driver."""
    sharing_asked: str
    """mps or turns, as configured."""
    sharing_used: str
    """turns, although mps was asked: the MPS daemon could not be had."""
    why: str = ""
    """Of a use that is not what was asked."""
    total_bytes: int
    used_bytes: int | None = None
    """By this run, as the driver says."""
    overhead_bytes: int | None = None
    """What no lease covers, measured when everything was loaded."""


class TrackerView(View):
    """A tracker of another maker, which gets the run's numbers too."""

    name: str
    """wandb, trackio or mlflow."""
    state: Literal["starting", "ready", "failed"]
    detail: str = ""
    """Where the numbers go, or why it failed."""
    dropped_rows: int = 0
    """Rows that it did not keep up with."""


class SwapView(View):
    """The newest replacement of a service."""

    role: Role
    command: tuple[str, ...]
    state: Literal["testing", "passed", "swapped", "refused"]
    """passed: it conforms, and takes the place at the next border between iterations."""
    case: str = ""
    """Where it was refused: a case of the conformance test, or `takeover`."""
    got: str = ""
    needed: str = ""
    step: int | None = None
    """The first iteration that it takes part in."""


class RestartView(View):
    """The newest restart of all workers."""

    number: int
    """1 for the first of the run."""
    allowed: int
    """run.restarts."""
    service: str
    """Whose end it followed."""
    how: str
    """It ended."""
    phase: str
    step: int | None = None
    wall_s: float
    """When, as seconds since 1970."""
    state: Literal["under way", "done"]


class StatusView(View):
    """Where the run stands."""

    run: str
    phase: str
    """IDLE, LOAD, ROLLOUT, SCORE, TRAIN, UPDATE, CHECKPOINT, EVAL or DRAIN."""
    step: int
    """The iteration that runs, or the number of the next one."""
    version: int
    """Of the weights: how many updates were committed."""
    iterations_wanted: int
    iterations_done: int
    schedule: str
    stopping: StopWhen | None = None
    """A stop that was asked for and has not happened yet."""
    started_wall_s: float
    """When this coordinator started, as seconds since 1970."""
    waiting: tuple[WaitView, ...] = ()
    """Oldest first."""
    gpu: GpuView | None = None
    """The first one; None on host memory."""
    gpus: tuple[GpuView, ...] = ()
    """All of them, in the order of devices."""
    trackers: tuple[TrackerView, ...] = ()
    """Those of the configuration."""
    restarts: int = 0
    """How often all workers were started again after one of them had ended."""
    restart: RestartView | None = None
    """None: there was none."""
    swap: SwapView | None = None
    """None: no service has been replaced."""


class IterationView(View):
    """One iteration, from the journal."""

    step: int
    state: Literal["running", "committed", "skipped", "ended"]
    """committed: the weights moved. skipped: the vote refused the update. ended: over without either."""
    version: int
    """The weights version that every token was sampled from."""
    version_after: int | None = None
    rows: tuple[int, ...]
    """Rows of the dataset, in the order of the groups."""
    started_wall_s: float
    duration_s: float | None = None
    phases_s: dict[str, float] = {}
    """Seconds per phase; a phase that still runs is not in it."""
    groups_finished: int = 0
    groups_skipped: int = 0
    metrics: dict[str, MaybeFinite] = {}
    """TRL's names where TRL has the quantity."""


# --- memory -------------------------------------------------------------------------------------------------------


class LeaseView(View):
    """A lease that is held."""

    lease: int
    kind: Kind
    owner: str
    purpose: str = ""
    device: str
    size_bytes: int
    held_bytes: int | None = None
    """What really lies under it, as its owner measured last; null where it has not measured yet."""
    segment: int | None = None
    """Null: private memory of the owner."""
    last_consumer: str = ""
    """Whose being done with it ends the lease."""
    age_s: float = 0.0


class LeaseRequestView(View):
    """A request that waits for memory."""

    kind: Kind
    owner: str
    purpose: str = ""
    device: str
    size_bytes: int
    age_s: float = 0.0


class BudgetView(View):
    """The budget of one device."""

    device: str
    budget_bytes: int
    leased_bytes: int
    reserved_bytes: int = 0
    """Set aside in this phase for leases to come."""
    peak_bytes: int
    """The most that was ever leased at once."""


class LedgerView(View):
    """Who may hold how much memory."""

    devices: tuple[BudgetView, ...]
    leases: tuple[LeaseView, ...]
    waiting: tuple[LeaseRequestView, ...] = ()
    """Per device in the order in which they will be granted."""


# --- services -----------------------------------------------------------------------------------------------------


class ServiceView(View):
    """One service process."""

    service: str
    role: Role
    device: str
    incarnation: int
    pid: int
    state: Literal["starting", "ready", "busy", "dead"]
    busy_with: str = ""
    """The instruction that it carries out."""
    heard_age_s: float | None = None
    """Since its last message; null before the first."""
    log_path: str = ""
    command: tuple[str, ...] = ()
    """Its program; empty if this coordinator did not start it."""
    since_wall_s: float | None = None
    """When it joined, as seconds since 1970."""


class DigestView(View):
    """The weights as one process sees them through its own mapping."""

    service: str
    version: int
    digest: str


class DigestsView(View):
    """Everybody's digest of the weights."""

    digests: tuple[DigestView, ...]

    @computed_field  # type: ignore[prop-decorator] # mypy does not know a decorated property (pydantic's own advice)
    @property
    def agree(self) -> bool:
        """All see the same version, and on each device the same bytes: one device's segment is not another's."""
        seen = {(digest.service.partition("[")[2], digest.digest) for digest in self.digests}
        one_version = len({digest.version for digest in self.digests}) <= 1
        return one_version and len(seen) == len({place for place, _ in seen})


class CheckpointView(View):
    """One checkpoint on disk."""

    step: int
    version: int
    folder: str
    size_bytes: int
    saved_wall_s: float


class HealthPart(View):
    """One thing that the run needs."""

    name: str
    ok: bool
    detail: str = ""


class HealthView(View):
    """Whether the run can go on."""

    parts: tuple[HealthPart, ...]

    @computed_field  # type: ignore[prop-decorator] # as above
    @property
    def ok(self) -> bool:
        """Nothing is down."""
        return all(part.ok for part in self.parts)

    @computed_field  # type: ignore[prop-decorator] # as above
    @property
    def down(self) -> tuple[str, ...]:
        """The names of what is down."""
        return tuple(part.name for part in self.parts if not part.ok)


class ErrorView(View):
    """Any refusal or failure."""

    kind: str
    what: str
    got: str = ""
    needed: str = ""
    do: str = ""
    where: str = ""


class ErrorBody(View):
    """The body of every answer with a status of 400 or above."""

    error: ErrorView
