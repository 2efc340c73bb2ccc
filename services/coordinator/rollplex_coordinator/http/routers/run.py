"""Status and stop."""

from __future__ import annotations

from fastapi import APIRouter

from rollplex_coordinator.http.deps import ControlDep
from rollplex_coordinator.http.views import StatusView, StopRequest

router = APIRouter(tags=["run"])


@router.get("/status")
def show_status(control: ControlDep) -> StatusView:
    """Where the run stands: phase, step, weights version, and what is waited for, from whom, since when."""
    return control.status()


@router.post("/stop", status_code=202)
def stop(request: StopRequest, control: ControlDep) -> StatusView:
    """Stop after the present iteration, or now. Answered when noted, not when done."""
    return control.stop(when=request.when, exit=request.exit)
