"""The link to the newest: always there, always whole, and never in place of what somebody else put there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollplex.latest import link_latest


def make(folder: Path, name: str) -> Path:
    target = folder / name
    target.mkdir(parents=True)
    (target / "file").write_text(name)
    return target


def test_it_leads_to_the_target_also_after_the_folder_was_moved(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    assert link_latest(folder, make(folder, "demo/run")) == ""
    assert (folder / "latest").readlink() == Path("demo/run")
    moved = folder.rename(tmp_path / "elsewhere")
    assert (moved / "latest" / "file").read_text() == "demo/run"


def test_a_newer_target_replaces_it_in_one_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs"
    link_latest(folder, make(folder, "one"))
    seen = []
    replace = Path.replace

    def look(self: Path, target: Path) -> Path:
        seen.append((folder / "latest" / "file").read_text())
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", look)
    assert link_latest(folder, make(folder, "two")) == ""
    assert seen == ["one"]
    assert (folder / "latest" / "file").read_text() == "two"
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "one", "two"]


def test_a_link_to_what_is_gone_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("gone")
    assert link_latest(tmp_path, make(tmp_path, "one")) == ""
    assert (tmp_path / "latest" / "file").read_text() == "one"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_link_is_left_alone_and_told(tmp_path: Path, kind: str) -> None:
    link = tmp_path / "latest"
    link.write_text("mine") if kind == "file" else make(tmp_path, "latest")
    problem = link_latest(tmp_path, make(tmp_path, "one"))
    assert "is no link and is left alone" in problem
    assert not link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one"]


def test_a_link_that_cannot_be_made_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "fsync", refuse)
    assert "Operation not supported" in link_latest(tmp_path, make(tmp_path, "one"))
    assert "cannot be made" in link_latest(tmp_path / "missing", tmp_path / "missing" / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one"]
