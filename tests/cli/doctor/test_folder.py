"""The folder in which runs go."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollplex.cli.doctor import folder
from rollplex.cli.doctor.finding import Finding, Verdict
from rollplex.protocol.claim import claim


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose path leaves room for the names of runs."""
    return tmp_path_factory.mktemp("f")


def found(runs_dir: Path) -> dict[str, Finding]:
    return {finding.topic: finding for finding in folder.check(runs_dir)}


def test_a_good_folder_is_well_and_left_as_it_was(tmp_path: Path) -> None:
    claim(tmp_path / "runs" / "a-1", "r1").release()
    findings = found(tmp_path / "runs")
    assert {finding.verdict for finding in findings.values()} == {Verdict.OK}
    assert findings["runs folder"].text == f"{tmp_path / 'runs'}, 1 runs"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a-1"]


def test_one_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    findings = found(tmp_path / "a" / "runs")
    assert findings["runs folder"].text.endswith("not made yet")
    assert findings["files"].verdict is Verdict.OK
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_leaves_no_room_for_names_is_a_problem(tmp_path: Path) -> None:
    path = found(tmp_path / ("x" * 80))["path"]
    assert path.verdict is Verdict.PROBLEM
    assert "ROLLPLEX_RUNS_DIR" in path.do


def test_the_room_for_names_is_what_a_claim_allows(tmp_path: Path) -> None:
    room = int(found(tmp_path)["path"].text.split()[5])
    claim(tmp_path / ("n" * room), "r1").release()
    with pytest.raises(Exception, match="too long"):
        claim(tmp_path / ("n" * (room + 1)), "r1")


def test_a_network_file_system_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "file_system_of", lambda _: "nfs4")
    assert found(tmp_path)["file system"].verdict is Verdict.PROBLEM


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(folder.tempfile, "TemporaryDirectory", refuse)  # type: ignore[attr-defined] # as it sees it
    files = found(tmp_path)["files"]
    assert (files.verdict, "read-only" in files.text) == (Verdict.PROBLEM, True)


def test_little_free_space_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    assert found(tmp_path)["disk"].verdict is Verdict.NOTE
