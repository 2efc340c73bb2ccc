"""Whether the run can go on."""

from __future__ import annotations

from fastapi import APIRouter, Response

from rollplex_coordinator.http.deps import PartsDep
from rollplex_coordinator.http.guard import OPEN_PATH
from rollplex_coordinator.http.views import HealthView

router = APIRouter(tags=["health"])


@router.get(OPEN_PATH, responses={503: {"model": HealthView, "description": "Something is down."}})
def show_health(parts: PartsDep, response: Response) -> HealthView:
    """What the run needs, and whether it is there; 503 names in `down` what is not. Needs no token."""
    view = parts.health.check()
    response.status_code = 200 if view.ok else 503
    return view
