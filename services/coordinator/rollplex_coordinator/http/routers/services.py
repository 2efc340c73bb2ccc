"""Service processes."""

from __future__ import annotations

from fastapi import APIRouter

from rollplex_coordinator.http.deps import ControlDep
from rollplex_coordinator.http.views import DigestsView, Nothing, ServiceView

router = APIRouter(prefix="/services", tags=["services"])


@router.get("")
def list_services(control: ControlDep) -> tuple[ServiceView, ...]:
    """Every service process, dead ones too."""
    return control.services()


@router.post("/digests")
def take_digests(control: ControlDep, request: Nothing | None = None) -> DigestsView:  # noqa: ARG001 - for its check
    """Ask every service that maps the weights for its digest of them. Every byte is read, which takes time."""
    return control.digests()
