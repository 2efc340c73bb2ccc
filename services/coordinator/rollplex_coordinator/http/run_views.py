"""What the routes of past and present runs show. As `views`, the single source of the OpenAPI document."""

from __future__ import annotations

from rollplex_coordinator.http.views import ErrorView, MaybeFinite, View


class RunErrorView(View):
    """The error that ended a run."""

    error: ErrorView
    phase: str
    step: int | None = None
    service: str = ""
    log_path: str = ""


class RunView(View):
    """One run of the runs folder, or an earlier attempt in its directory."""

    name: str
    attempt: int = 0
    """0: the run as its directory has it now; from 1 on: what an earlier one left in attempts/N."""
    current: bool
    """It is the run of the coordinator that answers."""
    run: str
    """Its id."""
    state: str
    """running, done, stopped, failed, refused, killed, not started or unreadable."""
    schedule: str = ""
    started_wall_s: float | None = None
    ended_wall_s: float | None = None
    iterations: int = 0
    iterations_wanted: int | None = None
    reward: MaybeFinite = None
    """Of the last iteration."""
    reason: str = ""
    """Why it ended, in words."""
    error: RunErrorView | None = None
    folder: str


class ColumnsView(View):
    """Numbers over iterations: `values[name][i]` belongs to `steps[i]`; null: not there, or not finite."""

    steps: tuple[int, ...]
    values: dict[str, tuple[MaybeFinite, ...]]
    names: tuple[str, ...]
    """Every number that the run has."""
    rows: int
    stride: int
    """Every so many iterations were taken, and the last one."""


class SpanView(View):
    """Something that took time; seconds from the beginning of the timeline. Without an end: a moment."""

    name: str
    kind: str
    start_s: float
    end_s: float | None
    step: int | None
    text: str = ""


class LaneView(View):
    """What one service, or the node itself, did."""

    name: str
    spans: tuple[SpanView, ...]


class TimelineView(View):
    """A few iterations of a run, as `rollplex trace` tells them."""

    steps: tuple[int, ...]
    first_step: int | None
    """Of the run."""
    last_step: int | None
    seconds: float
    phases: tuple[SpanView, ...]
    lanes: tuple[LaneView, ...]
    cut: bool
    """There was more than is shown at once: ask for fewer iterations."""


class PictureView(View):
    """A picture of a prompt, or why there is none."""

    name: str
    width: int
    height: int
    problem: str = ""
    index: int | None
    """For its address; null: there is no picture."""


class ResponseView(View):
    """One response."""

    sample: int
    text: str
    """Cut where it is long."""
    more_characters: int = 0
    reward: MaybeFinite
    rewards: dict[str, MaybeFinite]
    advantage: MaybeFinite
    tokens: int
    stopped: bool
    """It ended by itself, not by its length."""


class SampleView(View):
    """One prompt of a table of samples, with the responses that were asked for."""

    step: int
    version: int
    group: int
    row: int
    prompt: str
    pictures: tuple[PictureView, ...]
    left_out: int = 0
    """Pictures beyond these."""
    missing: str = ""
    """Why prompt and pictures are not here."""
    skipped: str = ""
    """Why the group has no rewards."""
    responses: tuple[ResponseView, ...]
    more_responses: int = 0


class SamplesView(View):
    """Samples, the newest first."""

    samples: tuple[SampleView, ...]
    tables: int
    """Steps of which the run has samples."""
    next_step_to: int | None = None
    """Go on with this `step_to`; null: this was all."""
