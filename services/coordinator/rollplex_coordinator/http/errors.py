"""Errors of the HTTP API, and the one place that turns any error into a response.

    HttpError                carries its status
    ├── MalformedError       400   a path, query or header that is not what it must be
    ├── UnauthorizedError    401   no token, or a wrong one
    ├── CrossSiteError       403   a page of another site asks for a change
    ├── NotFoundError        404
    ├── MethodError          405   the method is not allowed
    ├── SlowBodyError        408   a body that does not arrive
    ├── ConflictError        409   the journal or the run is not where the request thinks
    ├── TooLargeError        413
    ├── NotJsonError         415   a change asked for in a form that a foreign page could send too
    ├── ForeignHostError     421   addressed to another name than ours (DNS rebinding)
    ├── BodyError            422   a body that is not what it must be
    └── UnavailableError     503

An error of the core keeps its kind: StateError and BudgetError are 409, WaitError is 504, anything else 500.
"""

from __future__ import annotations

import logging
from typing import ClassVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from rollplex.errors import BudgetError, RollplexError, StateError, WaitError
from rollplex_coordinator.http.views import ErrorView

_log = logging.getLogger(__name__)


class HttpError(RollplexError):
    """Base of the API's own errors."""

    status: ClassVar[int] = 500


class MalformedError(HttpError):
    """A path, query or header that is not what it must be."""

    status = 400


class UnauthorizedError(HttpError):
    """No token, or a wrong one."""

    status = 401


class CrossSiteError(HttpError):
    """A page of another site asks for a change."""

    status = 403


class NotFoundError(HttpError):
    """There is no such thing."""

    status = 404


class MethodError(HttpError):
    """The method is not allowed."""

    status = 405


class SlowBodyError(HttpError):
    """A body that does not arrive."""

    status = 408


class ConflictError(HttpError):
    """The journal or the run is not where the request thinks."""

    status = 409


class TooLargeError(HttpError):
    """A body above the limit."""

    status = 413


class NotJsonError(HttpError):
    """A change asked for in a form that a foreign page could send too."""

    status = 415


class ForeignHostError(HttpError):
    """Addressed to another name than ours."""

    status = 421


class BodyError(HttpError):
    """A body that is not what it must be."""

    status = 422


class UnavailableError(HttpError):
    """Not now."""

    status = 503


_OF_STATUS: dict[int, type[HttpError]] = {kind.status: kind for kind in HttpError.__subclasses__()}


def status_of(error: RollplexError) -> int:
    """The HTTP status of an error."""
    match error:
        case HttpError():
            return error.status
        case StateError() | BudgetError():
            return 409
        case WaitError():
            return 504
        case _:
            return 500


def answer(error: RollplexError) -> JSONResponse:
    """The response to a request that ended in this error."""
    status = status_of(error)
    if status >= 500:
        _log.error("HTTP %d: %s", status, error)
    view = ErrorView(
        kind=type(error).__name__,
        what=error.what,
        got=error.got,
        needed=error.needed,
        do=error.do,
        where=error.where,
    )
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": view.model_dump()}, status_code=status, headers=headers)


def install(app: FastAPI) -> None:
    """Let every expected error of the app end in `answer`; a bug goes on to the guard, which ends it there too."""
    for kind in (RollplexError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _on_error)


async def _on_error(_request: Request, error: Exception) -> JSONResponse:
    return answer(as_ours(error))


def as_ours(error: Exception) -> RollplexError:
    """Any exception as one of ours. A bug is logged here, and shown without its text."""
    match error:
        case RollplexError():
            return error
        case RequestValidationError():
            problems = [(".".join(str(part) for part in item["loc"]), str(item["msg"])) for item in error.errors()[:8]]
            in_body = all(place.partition(".")[0] == "body" for place, _ in problems)
            kind = BodyError if in_body else MalformedError
            return kind("the request is malformed", needed="; ".join(f"{place}: {text}" for place, text in problems))
        case HTTPException(status_code=400):  # FastAPI: a body that is no JSON at all, such as bytes that are no text
            return BodyError(str(error.detail))
        case HTTPException():
            return _OF_STATUS.get(error.status_code, MalformedError)(str(error.detail))
        case _:
            _log.error("a bug of the control API", exc_info=error)
            return HttpError("the coordinator failed at this request", do="Its log says why.")
