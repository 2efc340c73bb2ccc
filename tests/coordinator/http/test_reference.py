"""docs/http.md is what the routes say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollplex_coordinator.http.reference import main, reference

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "http.md"


@pytest.fixture(scope="module")
def made() -> str:
    return reference()


def test_the_document_is_the_one_that_the_routes_make(made: str) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == made, "run: python -m rollplex_coordinator.http.reference docs/http.md"


def test_every_route_and_every_model_that_is_named_is_there(made: str) -> None:
    for route in ("GET /status", "POST /iterations", "POST /stop", "GET /healthz", "GET /events", "GET /metrics"):
        assert f"### {route}\n" in made
    headings = {line.removeprefix("### ").lower() for line in made.splitlines() if line.startswith("### ")}
    named = set(re.findall(r"\]\(#([a-z0-9_]+)\)", made))
    assert named
    assert named <= headings


def test_bodies_parameters_and_defaults_are_said(made: str) -> None:
    assert "Body: [StartRequest](#startrequest)." in made
    assert re.search(r"^\| `count` \| integer ≥ 1 ≤ 1000000000 \| How many", made, re.MULTILINE)
    assert re.search(r"^\| `exit` \| boolean, default `true` \|", made, re.MULTILINE)
    assert re.search(r"^\| `limit` \| query \| integer ≥ 1", made, re.MULTILINE)


def test_the_command_writes_the_file_it_is_given(tmp_path: Path, made: str) -> None:
    assert main([str(tmp_path / "out.md")]) == 0
    assert (tmp_path / "out.md").read_text(encoding="utf-8") == made
    assert main([]) == 2
