"""Who may talk to the API at all: checks before any route, on every route.

    Host is ours (DNS rebinding)       421   every request
    Authorization: Bearer <token>      401   every request but GET of /healthz and of the dashboard's own files, which
                                             hold nothing of the run; also unknown addresses
    method is GET or POST              405
    not from a foreign page (CSRF)     403   POST: Origin is ours or absent, Sec-Fetch-Site same-origin, none or absent
    body is application/json           415   POST: a type that no HTML form can send without asking first
    body is small and arrives          413, 408

No CORS headers are ever sent and no cookie is read, so that a page of another site can neither read nor change
anything, even where it can reach the port. The token is compared in constant time and appears in no log.
Knows nothing of routes beyond the open addresses.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Callable, Collection, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollplex.errors import ConfigError
from rollplex_coordinator.http.errors import (
    CrossSiteError,
    ForeignHostError,
    MethodError,
    NotJsonError,
    SlowBodyError,
    TooLargeError,
    UnauthorizedError,
    answer,
    as_ours,
)

OPEN_PATH = "/healthz"
LOCAL_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
MAX_BODY_BYTES = 64 * 1024
BODY_DEADLINE_S = 10.0
METHODS = frozenset({"GET", "POST"})

_NAME = r"\[[0-9a-f:.]+\]|[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?"
_HOST = re.compile(rf"({_NAME})(?::[0-9]{{1,5}})?")
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_PAGE_HEADERS = _HEADERS | {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Of the dashboard's own files: they run scripts, their own only."""


class Guard:
    """ASGI middleware around the whole app.

    Args:
        app: what is guarded.
        token: the bearer token.
        hosts: names and addresses beside the loopback ones that requests may be addressed to, without port.
        pages: addresses of the dashboard's own files.
        count: told the method and the status of every answered request.

    Raises:
        ConfigError: a host that is not a plain name or address.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str,
        hosts: Collection[str],
        count: Callable[[str, int], None],
        pages: Collection[str] = (),
    ) -> None:
        self._app = app
        self._token = token.encode()
        self._hosts = LOCAL_HOSTS | {_checked_host(host) for host in hosts}
        self._count = count
        self._pages = frozenset(pages)
        self._open = self._pages | {OPEN_PATH}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        shown = _PAGE_HEADERS if scope["path"] in self._pages else _HEADERS
        answering = _Answering(send, shown, lambda status: self._count(scope["method"], status))
        try:
            await self._app(scope, await self._admit(scope, Headers(scope=scope), receive), answering)
        except Exception as error:
            # The outer loop of a request. uvicorn would reset the connection, and log the error a second time.
            ours = as_ours(error)
            if answering.started:
                raise
            await answer(ours)(scope, receive, answering)

    async def _admit(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        host = check_host(headers, self._hosts)
        if scope["method"] != "GET" or scope["path"] not in self._open:
            self._check_token(headers)
        if scope["method"] not in METHODS:
            raise MethodError("this method is not allowed", got=scope["method"], needed="GET or POST")
        if scope["method"] == "GET":
            return receive
        check_same_site(headers, host)
        check_json(headers)
        return await _whole_body(headers, receive)

    def _check_token(self, headers: Headers) -> None:
        values = headers.getlist("authorization")
        scheme, _, token = values[0].partition(" ") if len(values) == 1 else ("", "", "")
        right = hmac.compare_digest(token.strip().encode("latin-1"), self._token)
        if scheme.lower() != "bearer" or not right:
            raise UnauthorizedError(
                "this needs the run's token",
                got="a wrong one" if values else "none",
                needed="the header Authorization: Bearer <token>",
                do="The token is in the run directory, readable by its owner.",
            )


class _Answering:
    """`send` of one request: adds the headers that every answer has, and knows whether one has begun."""

    def __init__(self, send: Send, headers: Mapping[str, str], count: Callable[[int], None]) -> None:
        self._send = send
        self._headers = headers
        self._count = count
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            MutableHeaders(scope=message).update(self._headers)
            self._count(message["status"])
        await self._send(message)


def check_host(headers: Headers, hosts: Collection[str]) -> str:
    """The Host header, if it is one of `hosts` with any port or none.

    Raises:
        ForeignHostError: it is missing, doubled, or another name.
    """
    values = headers.getlist("host")
    match = _HOST.fullmatch(values[0].lower()) if len(values) == 1 else None
    if match is None or match[1] not in hosts:
        raise ForeignHostError(
            "this is not the host that the request is addressed to",
            got=", ".join(values)[:200] or "no Host header",
            needed=f"one of {', '.join(sorted(hosts))}",
            do="Add the name to the configuration's allowed hosts if it is meant.",
        )
    return values[0].lower()


def check_same_site(headers: Headers, host: str) -> None:
    """Refuse what a browser sends for a page of another site.

    Raises:
        CrossSiteError: Origin or Sec-Fetch-Site says so.
    """
    for origin in headers.getlist("origin"):
        if origin.lower() not in {f"http://{host}", f"https://{host}"}:
            raise CrossSiteError(
                "a page of another origin asks for a change", got=origin[:200], needed=f"http://{host}"
            )
    for site in headers.getlist("sec-fetch-site"):
        if site.lower() not in {"same-origin", "none"}:
            raise CrossSiteError("a page of another site asks for a change", got=site[:200], needed="same-origin")


def check_json(headers: Headers) -> None:
    """Refuse a body of another type than JSON, and one that does not say.

    Raises:
        NotJsonError: Content-Type is not application/json.
    """
    values = headers.getlist("content-type")
    kind = values[0].partition(";")[0].strip().lower() if len(values) == 1 else ""
    if kind != "application/json":
        raise NotJsonError(
            "a change is asked for in JSON only",
            got=", ".join(values)[:200] or "no Content-Type",
            needed="Content-Type: application/json",
        )


async def _whole_body(headers: Headers, receive: Receive) -> Receive:
    """Read the body now, so that no route meets one that is too large or never ends; returns what replays it."""
    declared = headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared) > MAX_BODY_BYTES:
        raise _too_large(declared)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return _replay(message, receive)
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large(f"more than {MAX_BODY_BYTES}")
                if not message.get("more_body", False):
                    break
    except TimeoutError as error:
        raise SlowBodyError("the body did not arrive", needed=f"all of it within {BODY_DEADLINE_S:g} s") from error
    return _replay({"type": "http.request", "body": bytes(body), "more_body": False}, receive)


def _replay(first: Message, receive: Receive) -> Receive:
    pending = [first]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


def _too_large(got: str) -> TooLargeError:
    return TooLargeError("the body is too large", got=f"{got[:32]} bytes", needed=f"at most {MAX_BODY_BYTES}")


def _checked_host(host: str) -> str:
    name = f"[{host.lower()}]" if ":" in host and not host.startswith("[") else host.lower()
    if _HOST.fullmatch(name) is None or re.fullmatch(_NAME, name) is None:
        raise ConfigError(
            "an allowed host must be a plain name or address",
            got=host[:200],
            needed='a name without port or wildcard, such as "coordinator" or "fd00::1"',
        )
    return name
