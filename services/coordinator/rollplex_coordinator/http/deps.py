"""What routes are given: the control, the streams, the metrics, past runs. The only place that knows where an app keeps
them. An app that only shows past runs has no more than these."""

from __future__ import annotations

from typing import Annotated, TypeAlias, cast

from fastapi import Depends, FastAPI, Request
from msgspec import Struct

from rollplex_coordinator.http.control import Control
from rollplex_coordinator.http.health import Health
from rollplex_coordinator.http.metrics import Metrics
from rollplex_coordinator.http.past import Past
from rollplex_coordinator.http.streams import Streams


class Parts(Struct, frozen=True, kw_only=True):
    """What an app is made of."""

    control: Control
    streams: Streams
    metrics: Metrics
    health: Health


def keep(app: FastAPI, parts: Parts) -> None:
    """Give an app its parts."""
    app.state.rollplex = parts


def parts_of(app: FastAPI) -> Parts:
    """The parts of an app."""
    return cast("Parts", app.state.rollplex)


def streams_of(app: FastAPI) -> Streams | None:
    """The event streams of an app; None: it has no run."""
    return parts_of(app).streams if hasattr(app.state, "rollplex") else None


def keep_past(app: FastAPI, past: Past) -> None:
    """Give an app the past runs."""
    app.state.past = past


def _past(request: Request) -> Past:
    return cast("Past", request.app.state.past)


def _parts(request: Request) -> Parts:
    return parts_of(cast("FastAPI", request.app))


def _control(request: Request) -> Control:
    return _parts(request).control


PartsDep: TypeAlias = Annotated[Parts, Depends(_parts)]
ControlDep: TypeAlias = Annotated[Control, Depends(_control)]
PastDep: TypeAlias = Annotated[Past, Depends(_past)]
