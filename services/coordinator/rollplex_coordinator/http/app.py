"""The ASGI app: routers, the guard around them, the one error handler.

Owns how the pieces are put together, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from fastapi import Depends, FastAPI
from fastapi.responses import HTMLResponse
from fastapi.security import HTTPBearer

import rollplex
from rollplex_coordinator.http import docs, errors
from rollplex_coordinator.http.control import Control
from rollplex_coordinator.http.deps import Parts, keep
from rollplex_coordinator.http.guard import Guard
from rollplex_coordinator.http.health import Health
from rollplex_coordinator.http.metrics import Metrics
from rollplex_coordinator.http.routers import checkpoints, events, health, iterations, ledger, metrics, run, services
from rollplex_coordinator.http.streams import Streams, StreamSettings
from rollplex_coordinator.http.views import ErrorBody

DESCRIPTION = (
    "Control of one Rollplex run. Every address but /healthz needs the header Authorization: Bearer <token>; "
    "changes are POST with a JSON body."
)


def create_app(
    control: Control,
    journal_path: Path,
    token: str,
    allowed_hosts: Collection[str],
    *,
    streams: StreamSettings | None = None,
) -> FastAPI:
    """The control API of one run.

    Args:
        control: asks the core.
        journal_path: of a journal that exists; read for events and metrics.
        token: the bearer token (`http.token`).
        allowed_hosts: names beside the loopback ones that a request may be addressed to, without port.
        streams: how event streams behave.

    Raises:
        ConfigError: an allowed host that is no plain name or address.
    """
    app = FastAPI(
        title="Rollplex",
        version=rollplex.__version__,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={
            "4XX": {"model": ErrorBody, "description": "Refused."},
            "5XX": {"model": ErrorBody, "description": "Failed."},
        },
    )
    parts = Parts(
        control=control,
        streams=Streams(journal_path, streams or StreamSettings()),
        metrics=Metrics(journal_path),
        health=Health(control, journal_path),
    )
    keep(app, parts)
    errors.install(app)
    bearer = Depends(HTTPBearer(auto_error=False))  # for the OpenAPI document; the guard does the checking
    for module in (run, iterations, ledger, services, checkpoints, events, metrics):
        app.include_router(module.router, dependencies=[bearer])
    app.include_router(health.router)

    @app.get("/docs", include_in_schema=False)
    def show_docs() -> HTMLResponse:
        return HTMLResponse(docs.page(app.openapi()))

    app.add_middleware(Guard, token=token, hosts=allowed_hosts, count=parts.metrics.count_request)
    return app
