"""Metrics for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from rollplex_coordinator.http.deps import PartsDep
from rollplex_coordinator.http.metrics import CONTENT_TYPE

router = APIRouter(tags=["metrics"])


@router.get("/metrics", response_class=PlainTextResponse)
def show_metrics(parts: PartsDep) -> Response:
    """The run's metrics in Prometheus' text format."""
    return Response(parts.metrics.render(parts.control), headers={"Content-Type": CONTENT_TYPE})
