"""Runs, past and present: numbers, timelines, samples. Reads files only; asks nothing of the core."""

from __future__ import annotations

from pathlib import Path as Folder
from typing import Annotated

import msgspec
from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from rollplex_coordinator.archive.numbers import read_columns
from rollplex_coordinator.archive.runs import Found
from rollplex_coordinator.archive.samples import Wanted, picture, search
from rollplex_coordinator.archive.timeline import MAX_ITERATIONS, read_timeline
from rollplex_coordinator.http.deps import PastDep
from rollplex_coordinator.http.errors import NotFoundError
from rollplex_coordinator.http.past import Past
from rollplex_coordinator.http.run_views import ColumnsView, RunErrorView, RunView, SamplesView, TimelineView
from rollplex_coordinator.http.sample_views import sample_view
from rollplex_coordinator.http.views import MAX_COUNT, ErrorView

router = APIRouter(prefix="/runs", tags=["runs"])

Name = Annotated[str, Path(min_length=1, max_length=512, description='Of the list, or "this".')]
Attempt = Annotated[int, Query(ge=0, le=MAX_COUNT)]
Number = Annotated[int, Path(ge=0, le=MAX_COUNT)]
Step = Annotated[int | None, Query(ge=0, le=MAX_COUNT)]
Reward = Annotated[float | None, Query(allow_inf_nan=False)]


@router.get("")
def list_runs(past: PastDep) -> tuple[RunView, ...]:
    """This run, its earlier attempts, and the runs beside it, newest first."""
    with past.reading():
        return tuple(_run_view(found, current=past.archive.is_own(found)) for found in past.archive.runs())


@router.get("/{run}/metrics")
def show_metrics(
    past: PastDep,
    run: Name,
    name: Annotated[list[str], Query(min_length=1, max_length=32)],
    attempt: Attempt = 0,
    points: Annotated[int, Query(ge=2, le=5_000)] = 1_000,
) -> ColumnsView:
    """Numbers over iterations, under TRL's names where TRL has the quantity; thinned to about `points`."""
    with past.reading():
        columns = read_columns(_folder(past, run, attempt), name, points=points)
    return ColumnsView.model_validate(msgspec.structs.asdict(columns))


@router.get("/{run}/timeline")
def show_timeline(
    past: PastDep,
    run: Name,
    attempt: Attempt = 0,
    first: Step = None,
    count: Annotated[int, Query(ge=1, le=MAX_ITERATIONS)] = 2,
) -> TimelineView:
    """What each service did in `count` iterations from step `first` on; without it, in the last ones."""
    with past.reading():
        timeline = read_timeline(_folder(past, run, attempt), first, count)
    return TimelineView.model_validate(msgspec.to_builtins(timeline))


@router.get("/{run}/samples")
def search_samples(
    past: PastDep,
    run: Name,
    *,
    attempt: Attempt = 0,
    row: Step = None,
    reward_from: Reward = None,
    reward_to: Reward = None,
    step_from: Annotated[int, Query(ge=0, le=MAX_COUNT)] = 0,
    step_to: Step = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 12,
) -> SamplesView:
    """Prompts with their pictures and responses, the newest first, by row of the dataset, reward and step."""
    wanted = Wanted(row=row, reward_from=reward_from, reward_to=reward_to, step_from=step_from, step_to=step_to)
    with past.reading():
        page = search(_folder(past, run, attempt), wanted, limit=limit)
    return SamplesView(
        samples=tuple(sample_view(hit) for hit in page.hits), tables=page.tables, next_step_to=page.next_step_to
    )


@router.get(
    "/{run}/samples/{step}/{group}/{index}", response_class=Response, responses={200: {"content": {"image/png": {}}}}
)
def show_picture(
    past: PastDep, run: Name, *, step: Number, group: Number, index: Number, attempt: Attempt = 0
) -> Response:
    """A picture of a sample, as PNG."""
    with past.reading():
        png = picture(_folder(past, run, attempt), step, group, index)
    if png is None:
        raise NotFoundError(
            "no such picture", got=f"step {step}, group {group}, picture {index}", needed="one of /runs/{run}/samples"
        )
    return Response(png, media_type="image/png")


def _folder(past: Past, run: str, attempt: int) -> Folder:
    folder = past.archive.folder(run, attempt)
    if folder is None:
        raise NotFoundError(
            "no such run",
            got=f"{run[:200]!r}, attempt {attempt}",
            needed='a name and an attempt of GET /runs, or "this"',
        )
    return folder


def _run_view(found: Found, *, current: bool) -> RunView:
    summary, raised = found.summary, found.error
    error = None
    if raised is not None:
        report = raised.error
        error = RunErrorView(
            error=ErrorView(
                kind=report.kind,
                what=report.what,
                got=report.got,
                needed=report.needed,
                do=report.do,
                where=report.where,
            ),
            phase=raised.phase,
            step=raised.step,
            service=raised.service,
            log_path=raised.log_path,
        )
    return RunView(
        name=found.name,
        attempt=found.attempt,
        current=current,
        run=summary.run,
        state=summary.state.value,
        schedule=found.schedule,
        started_wall_s=summary.started_s,
        ended_wall_s=summary.ended_s,
        iterations=summary.iterations,
        iterations_wanted=summary.iterations_wanted,
        reward=summary.reward,
        reason=summary.reason,
        error=error,
        folder=str(found.folder),
    )
