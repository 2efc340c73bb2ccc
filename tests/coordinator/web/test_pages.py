"""The dashboard's files: what is served, under which policy, and what they may not do."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rollplex_coordinator.http.app import create_history_app
from rollplex_coordinator.http.listening import listen
from rollplex_coordinator.http.pages import FOLDER, read_pages
from rollplex_coordinator.http.server import Server
from support.http_site import TOKEN

OURS = sorted(
    path for path in FOLDER.rglob("*") if path.suffix in {".html", ".js", ".css"} and "vendor" not in path.parts
)
VENDORED = FOLDER / "vendor" / "uplot"
ATTRIBUTE = re.compile(r'(?:src|href)="([^"]*)"')
IMPORT = re.compile(r'from "([^"]+)"')


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    server = Server(create_history_app(tmp_path_factory.mktemp("runs"), TOKEN, []), listen("127.0.0.1", 0))
    server.start()
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        yield client
    server.stop()


def test_every_file_is_served_without_a_token_as_it_lies_there(stranger: httpx.Client) -> None:
    pages = read_pages()
    assert "/" in pages
    assert "/web/js/main.js" in pages
    for address, (content, kind) in pages.items():
        answer = stranger.get(address)
        assert (answer.status_code, answer.content) == (200, content), address
        assert answer.headers["content-type"] == kind
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_policy_lets_a_page_run_its_own_scripts_and_ask_its_own_server_only(stranger: httpx.Client) -> None:
    said = stranger.get("/").headers["content-security-policy"]
    policy = {name: rest for name, _, rest in (part.strip().partition(" ") for part in said.split(";"))}
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self' blob:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }


def test_what_is_no_page_needs_the_token_and_is_then_not_there(stranger: httpx.Client) -> None:
    for path in ("/web/__init__.py", "/web/vendor/uplot/LICENSE", "/web/../archive/runs.py", "/web/", "/index.html"):
        assert stranger.get(path).status_code == 401, path
        assert stranger.get(path, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 404, path
    assert stranger.post("/", json={}).status_code == 401


def test_pages_load_nothing_from_elsewhere_and_name_only_files_that_there_are() -> None:
    pages = read_pages()
    for path in OURS:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?:https?:)?//[a-z]", text.replace("http://www.w3.org/2000/svg", ""), re.IGNORECASE), (
            path
        )
        for name in IMPORT.findall(text):
            assert (path.parent / name).resolve().is_file(), (path, name)
    index = pages["/"][0].decode()
    assert {f"/{name}" for name in ATTRIBUTE.findall(index) if not name.startswith("#")} <= set(pages)


def test_no_markup_is_made_of_text_and_nothing_is_kept_in_the_browser() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|localStorage|sessionStorage"
        r"|indexedDB|document\.cookie|EventSource"
    )
    for path in [*OURS, *VENDORED.glob("*.js")]:
        assert not forbidden.search(path.read_text(encoding="utf-8")), path
    index = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)", index)


def test_the_token_is_in_one_module_alone() -> None:
    holders = [
        path.name for path in OURS if path.suffix == ".js" and re.search(r"Authorization", path.read_text("utf-8"))
    ]
    assert holders == ["api.js"]


def test_vendored_files_are_those_that_were_looked_at() -> None:
    said = dict(
        re.findall(r"\| `([\w.]+)` \| `[\w./]+` \| `([0-9a-f]{64})` \|", (VENDORED / "SOURCE.md").read_text("utf-8"))
    )
    assert set(said) == {path.name for path in VENDORED.iterdir() if path.suffix in {".js", ".css"}}
    for name, digest in said.items():
        assert hashlib.sha256((VENDORED / name).read_bytes()).hexdigest() == digest, name
    assert "MIT" in (VENDORED / "LICENSE").read_text("utf-8")


def test_every_place_that_a_module_asks_for_is_in_the_page() -> None:
    index = Path(FOLDER / "index.html").read_text(encoding="utf-8")
    there = set(re.findall(r'\sid="([\w-]+)"', index))
    asked = {
        name
        for path in OURS
        if path.suffix == ".js"
        for name in re.findall(r'byId\("([\w-]+)"\)', path.read_text("utf-8"))
    }
    assert asked
    assert asked <= there
