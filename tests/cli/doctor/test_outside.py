"""Docker, by a program that stands in for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollplex.cli.doctor import outside
from rollplex.cli.doctor.finding import Finding, Verdict


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make programs by name from lines of shell; nothing else is on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()

    def make(**scripts: str) -> None:
        for name, text in scripts.items():
            file = tmp_path / "bin" / name.replace("_", "-")
            file.write_text(f"#!/bin/sh\n{text}\n")
            file.chmod(0o755)

    return make


def found() -> Finding:
    (finding,) = outside.check()
    return finding


def test_where_there_is_nothing_it_says_so_and_nothing_is_wrong(programs: Callable[..., None]) -> None:
    assert "not installed" in found().text
    assert found().verdict is Verdict.OK


def test_a_program_that_hangs_is_given_up(programs: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "ASK_S", 0.1)
    programs(docker="exec /bin/sleep 20")
    assert found().verdict is Verdict.NOTE


def test_docker_is_told_with_compose_and_its_silence_is_a_note(programs: Callable[..., None]) -> None:
    programs(docker='[ "$1" = version ] && echo 29.1 || echo 5.0')
    assert found().text == "engine 29.1, compose 5.0"
    programs(docker="exit 1")
    assert found().verdict is Verdict.NOTE
