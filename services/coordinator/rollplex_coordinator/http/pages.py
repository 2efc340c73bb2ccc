"""The dashboard's own files: read once from the package, served from memory under exact addresses.

Owns which files and under which type. No address is ever made into a path, and the files hold nothing of a run: they
may be had without a token.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

import rollplex_coordinator.web
from rollplex_coordinator.http.errors import NotFoundError

FOLDER = Path(rollplex_coordinator.web.__file__).parent
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


def read_pages() -> dict[str, tuple[bytes, str]]:
    """Content and type by address: "/" and "/web/…"."""
    found = {
        f"/web/{path.relative_to(FOLDER).as_posix()}": (path.read_bytes(), _TYPES[path.suffix])
        for path in sorted(FOLDER.rglob("*"))
        if path.suffix in _TYPES and path.name != INDEX
    }
    return {"/": ((FOLDER / INDEX).read_bytes(), _TYPES[".html"])} | found


def add_pages(app: FastAPI) -> Collection[str]:
    """Let an app serve them; returns their addresses."""
    pages = read_pages()

    @app.get("/", include_in_schema=False)
    @app.get("/web/{name:path}", include_in_schema=False)
    def show_page(request: Request) -> Response:
        page = pages.get(request.url.path)
        if page is None:
            raise NotFoundError("no such page", got=request.url.path[:200], needed="/")
        return Response(page[0], headers={"Content-Type": page[1]})

    return pages.keys()
