"""Checkpoints."""

from __future__ import annotations

from fastapi import APIRouter

from rollplex_coordinator.http.deps import ControlDep
from rollplex_coordinator.http.views import CheckpointView, Nothing, StatusView

router = APIRouter(prefix="/checkpoints", tags=["checkpoints"])


@router.get("")
def list_checkpoints(control: ControlDep) -> tuple[CheckpointView, ...]:
    """Those on disk, oldest first."""
    return control.checkpoints()


@router.post("", status_code=202)
def request_checkpoint(control: ControlDep, request: Nothing | None = None) -> StatusView:  # noqa: ARG001 - for its check
    """Write one after the present iteration. Answered when noted, not when done."""
    return control.checkpoint()
