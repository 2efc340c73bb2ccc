"""What is installed against what is asked for."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rollplex.cli.doctor import libraries
from rollplex.cli.doctor.finding import Finding, Verdict

INSTALLED = {"numpy": "2.1", "torch": "2.11.0+cpu", "rich": "12.0", "sglang": "0.5.1"}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in INSTALLED:
            raise metadata.PackageNotFoundError(name)
        return INSTALLED[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(libraries, "_extras", lambda: ["sglang", "demo", "bench", "dev"])


def found(*requirements: str) -> list[Finding]:
    return list(libraries.of_requirements([Requirement(text) for text in requirements]))


def test_what_is_in_its_range_is_one_line() -> None:
    (one,) = found("numpy>=2.0", "torch<2.15,>=2.11")
    assert (one.verdict, one.text) == (Verdict.OK, "numpy 2.1, torch 2.11.0+cpu")


def test_what_is_missing_or_out_of_range_is_a_problem_with_the_command_that_mends_it() -> None:
    _, rich, typer = found("rich>=13.7", "typer>=0.15")
    assert (rich.verdict, rich.text, rich.do) == (
        Verdict.PROBLEM,
        "12.0, but >=13.7 is asked for",
        "pip install 'rich>=13.7'",
    )
    assert (typer.verdict, typer.text, typer.do) == (Verdict.PROBLEM, "not installed", "pip install 'typer>=0.15'")


def test_what_only_an_extra_asks_for_may_be_missing_and_is_a_note_when_it_does_not_fit() -> None:
    first, sglang, last = found(
        'sglang==0.5.17; extra == "sglang"',
        'scikit-learn>=1.6; extra == "demo"',
        'scikit-learn>=1.6; extra == "bench"',
        'ruff>=0.9; extra == "dev"',
        'tomli; python_version < "3.0"',
    )
    assert first.text == "none"
    assert (sglang.verdict, sglang.topic) == (Verdict.NOTE, "sglang")
    assert (last.verdict, last.text) == (Verdict.OK, "not installed: scikit-learn (demo, bench)")


def test_sources_that_are_not_installed_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", nothing)
    assert [finding.verdict for finding in libraries.check()] == [Verdict.OK, Verdict.NOTE]


def test_the_commit_is_told_of_a_checkout_only(tmp_path: Path) -> None:
    assert libraries._commit(tmp_path) == ""
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *command], check=True, timeout=30)
    told = libraries._commit(tmp_path)
    assert told.startswith(", commit ")
    assert "changes" not in told
    (tmp_path / "file").touch()
    subprocess.run(["git", "-C", str(tmp_path), "add", "file"], check=True, timeout=30)
    assert libraries._commit(tmp_path).endswith(", with changes")
    (tmp_path / "broken" / ".git").mkdir(parents=True)
    (tmp_path / "broken" / ".git" / "HEAD").touch()
    assert libraries._commit(tmp_path / "broken").startswith(", ")
