"""The ledger of leases."""

from __future__ import annotations

from fastapi import APIRouter

from rollplex_coordinator.http.deps import ControlDep
from rollplex_coordinator.http.views import LedgerView

router = APIRouter(tags=["ledger"])


@router.get("/ledger")
def show_ledger(control: ControlDep) -> LedgerView:
    """Who may hold how much memory, and who waits for some."""
    return control.ledger()
