"""The ASGI apps: routers, the guard around them, the one error handler.

Owns how the pieces are put together, and nothing else. `create_app` is the control API of one run with its dashboard,
`create_history_app` the same dashboard over past runs, where none goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from fastapi import Depends, FastAPI
from fastapi.responses import HTMLResponse
from fastapi.security import HTTPBearer

import rollplex
from rollplex_coordinator.archive.runs import Archive
from rollplex_coordinator.http import docs, errors
from rollplex_coordinator.http.control import Control
from rollplex_coordinator.http.deps import Parts, keep, keep_past
from rollplex_coordinator.http.guard import Guard
from rollplex_coordinator.http.health import Health
from rollplex_coordinator.http.metrics import Metrics
from rollplex_coordinator.http.pages import add_pages
from rollplex_coordinator.http.past import Past
from rollplex_coordinator.http.routers import (
    checkpoints,
    events,
    health,
    iterations,
    ledger,
    metrics,
    run,
    runs,
    services,
)
from rollplex_coordinator.http.streams import Streams, StreamSettings
from rollplex_coordinator.http.views import ErrorBody

DESCRIPTION = (
    "Control of one Rollplex run. Every address but /healthz and the dashboard's own files needs the header "
    "Authorization: Bearer <token>; changes are POST with a JSON body."
)
HISTORY = "Past Rollplex runs, to be read. Every address but the dashboard's own files needs the header Authorization."


def create_app(
    control: Control,
    journal_path: Path,
    token: str,
    allowed_hosts: Collection[str],
    *,
    streams: StreamSettings | None = None,
) -> FastAPI:
    """The control API of one run, its dashboard, and the history of the runs beside it.

    Args:
        control: asks the core.
        journal_path: of a journal that exists; read for events and metrics. Its folder is the run directory.
        token: the bearer token (`http.token`).
        allowed_hosts: names beside the loopback ones that a request may be addressed to, without port.
        streams: how event streams behave.

    Raises:
        ConfigError: an allowed host that is no plain name or address.
    """
    app = _bare("Rollplex", DESCRIPTION)
    parts = Parts(
        control=control,
        streams=Streams(journal_path, streams or StreamSettings()),
        metrics=Metrics(journal_path),
        health=Health(control, journal_path),
    )
    keep(app, parts)
    keep_past(app, Past(Archive.around(journal_path.parent)))
    bearer = Depends(HTTPBearer(auto_error=False))  # for the OpenAPI document; the guard does the checking
    for module in (run, iterations, ledger, services, checkpoints, events, metrics, runs):
        app.include_router(module.router, dependencies=[bearer])
    app.include_router(health.router)
    return _guarded(app, token, allowed_hosts, parts.metrics.count_request)


def create_history_app(runs_dir: Path, token: str, allowed_hosts: Collection[str]) -> FastAPI:
    """The dashboard over the runs of a folder, read-only.

    Args:
        runs_dir: where runs lie.
        token: the bearer token.
        allowed_hosts: as for `create_app`.

    Raises:
        ConfigError: as for `create_app`.
    """
    app = _bare("Rollplex history", HISTORY)
    keep_past(app, Past(Archive(runs_dir)))
    app.include_router(runs.router, dependencies=[Depends(HTTPBearer(auto_error=False))])
    return _guarded(app, token, allowed_hosts, lambda _method, _status: None)


def _bare(title: str, description: str) -> FastAPI:
    app = FastAPI(
        title=title,
        version=rollplex.__version__,
        description=description,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={
            "4XX": {"model": ErrorBody, "description": "Refused."},
            "5XX": {"model": ErrorBody, "description": "Failed."},
        },
    )
    errors.install(app)
    return app


def _guarded(app: FastAPI, token: str, allowed_hosts: Collection[str], count: Callable[[str, int], None]) -> FastAPI:
    """With what every app has: documentation, the dashboard's files, and the guard around all of it."""

    @app.get("/docs", include_in_schema=False)
    def show_docs() -> HTMLResponse:
        return HTMLResponse(docs.page(app.openapi()))

    pages = add_pages(app)
    app.add_middleware(Guard, token=token, hosts=allowed_hosts, count=count, pages=pages)
    return app
