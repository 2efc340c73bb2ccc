"""Iterations: start them, look at them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from rollplex_coordinator.http.deps import ControlDep
from rollplex_coordinator.http.errors import NotFoundError
from rollplex_coordinator.http.views import MAX_COUNT, IterationView, StartRequest, StatusView

router = APIRouter(prefix="/iterations", tags=["iterations"])

Step = Annotated[int, Path(ge=0, le=MAX_COUNT)]


@router.post("", status_code=202)
def start(request: StartRequest, control: ControlDep) -> StatusView:
    """Run `count` more iterations. Answered when noted, not when done."""
    return control.start(request.count)


@router.get("")
def list_iterations(
    control: ControlDep,
    first: Annotated[int, Query(ge=0, le=MAX_COUNT)] = 0,
    limit: Annotated[int, Query(ge=1, le=1_000)] = 100,
) -> tuple[IterationView, ...]:
    """Iterations from step `first` on, in order."""
    return control.iterations(first, limit)


@router.get("/{step}")
def show_iteration(step: Step, control: ControlDep) -> IterationView:
    """One iteration."""
    view = control.iteration(step)
    if view is None:
        raise NotFoundError("no such iteration", got=f"step {step}", needed="one that has been started")
    return view
