"""Service processes."""

from __future__ import annotations

from fastapi import APIRouter

from rollplex.protocol.common import Role
from rollplex_coordinator.http.deps import ControlDep
from rollplex_coordinator.http.views import DigestsView, Nothing, ServiceView, SwapRequest, SwapView

router = APIRouter(prefix="/services", tags=["services"])


@router.get("")
def list_services(control: ControlDep) -> tuple[ServiceView, ...]:
    """Every service process, dead ones too."""
    return control.services()


@router.post("/digests")
def take_digests(control: ControlDep, request: Nothing | None = None) -> DigestsView:  # noqa: ARG001 - for its check
    """Ask every service that maps the weights for its digest of them. Every byte is read, which takes time."""
    return control.digests()


@router.post("/{role}/swap", status_code=202)
def swap_service(role: Role, request: SwapRequest, control: ControlDep) -> SwapView:
    """Replace a rollout, prefix or trainer service by another program. It is tested beside the run, and takes the place
    at the next border between iterations. Answered when noted; how it went is in `swap` of GET /status, and in the
    events."""
    return control.swap(role, request.command)
