"""Which run a command means: by path, by name, the live one, the newest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollplex.cli.target import all_runs, find_run, name_of
from rollplex.errors import ConfigError
from rollplex.protocol.claim import claim


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A runs folder of three ended runs: two plain ones, a newer in a demo's folder; and things that are no runs."""
    for at, path in enumerate(("a-1", "a-2", "demo-1/run")):
        folder = tmp_path / "runs" / path
        folder.mkdir(parents=True)
        journal = folder / "journal.sqlite"
        journal.write_text("events")
        os.utime(journal, (1000.0 + at, 1000.0 + at))
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "file").touch()
    return tmp_path / "runs"


def test_a_run_is_named_by_its_path_by_its_name_and_by_the_folder_of_its_demo(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parent)
    for given in (runs / "a-1", Path("runs/a-1"), Path("a-1")):
        assert find_run(given, Path("runs")) == runs / "a-1"
    for given in (runs / "demo-1", Path("demo-1"), Path("demo-1/run"), Path("runs/demo-1/run")):
        assert find_run(given, Path("runs")) == runs / "demo-1" / "run"


def test_every_run_has_a_name_that_finds_it(runs: Path) -> None:
    names = [name_of(path, runs) for path in all_runs(runs)]
    assert names == ["a-1", "a-2", "demo-1"]
    assert [find_run(Path(name), runs) for name in names] == all_runs(runs)
    assert name_of(runs.parent / "elsewhere", runs) == str(runs.parent / "elsewhere")


def test_without_a_name_the_run_that_lives_is_meant(runs: Path) -> None:
    with claim(runs / "b-1", "first"):
        assert find_run(None, runs) == runs / "b-1"


def test_without_a_name_several_live_runs_are_an_error_that_lists_them(runs: Path) -> None:
    with claim(runs / "b-1", "first"), claim(runs / "demo-2" / "run", "second"):
        with pytest.raises(ConfigError, match="Several runs are going on; got b-1, demo-2;"):
            find_run(None, runs)
        assert find_run(Path("b-1"), runs) == runs / "b-1"


def test_when_none_lives_the_link_to_the_latest_counts_and_else_the_newest_journal(runs: Path) -> None:
    assert find_run(None, runs) == runs / "demo-1" / "run"
    wal = runs / "a-2" / "journal.sqlite-wal"
    wal.touch()  # as a reader leaves it
    assert find_run(None, runs) == runs / "demo-1" / "run"
    wal.write_text("newer events")
    assert find_run(None, runs) == runs / "a-2"
    (runs / "latest").symlink_to("a-1")
    assert find_run(None, runs) == runs / "a-1"
    assert find_run(Path("latest"), runs) == runs / "a-1"
    assert len(all_runs(runs)) == 3


def test_a_link_to_a_run_that_was_removed_is_passed_over(runs: Path) -> None:
    (runs / "latest").symlink_to("gone")
    assert find_run(None, runs) == runs / "demo-1" / "run"


@pytest.mark.parametrize("made", [True, False])
def test_no_run_at_all_says_how_to_start_one(tmp_path: Path, made: bool) -> None:
    if made:
        (tmp_path / "runs").mkdir()
    with pytest.raises(ConfigError, match=r"There is no run; .*`rollplex up CONFIG`"):
        find_run(None, tmp_path / "runs")


def test_a_name_that_is_no_run_says_which_there_are(runs: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such run; got a-3; needed .*: demo-1, a-2, a-1\. "):
        find_run(Path("a-3"), runs)
    with pytest.raises(ConfigError, match="no such run; got notes;"):
        find_run(Path("notes"), runs)
