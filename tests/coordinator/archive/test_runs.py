from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollplex.cli.target import is_run
from rollplex.errors import JournalError
from rollplex.protocol.common import ErrorReport
from rollplex_coordinator.archive import runs
from rollplex_coordinator.archive.numbers import read_columns
from rollplex_coordinator.archive.runs import Archive
from rollplex_coordinator.archive.timeline import read_timeline
from support.past_runs import write_run


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def listed(archive: Archive) -> list[tuple[str, int, str]]:
    return sorted((found.name, found.attempt, found.summary.state.value) for found in archive.runs())


def test_runs_attempts_and_demo_folders_are_listed_by_name(runs_dir: Path) -> None:
    write_run(runs_dir / "a")
    write_run(runs_dir / "a" / "attempts" / "1", steps=1)
    write_run(runs_dir / "digits" / "run")
    (runs_dir / "notes").mkdir()
    archive = Archive(runs_dir)
    assert listed(archive) == [("a", 0, "done"), ("a", 1, "done"), ("digits", 0, "done")]
    assert archive.folder("a", 1) == runs_dir / "a" / "attempts" / "1"
    assert archive.folder("digits", 0) == runs_dir / "digits" / "run"


def test_the_archive_of_a_run_is_the_folder_around_it_and_the_run_is_this(runs_dir: Path) -> None:
    own = write_run(runs_dir / "digits" / "run")
    write_run(runs_dir / "a")
    archive = Archive.around(own)
    assert listed(archive) == [("a", 0, "done"), ("digits", 0, "done")]
    assert archive.folder("this", 0) == own
    assert [found.name for found in archive.runs() if archive.is_own(found)] == ["digits"]


def test_a_run_that_is_nowhere_near_the_folder_is_listed_all_the_same(runs_dir: Path, tmp_path: Path) -> None:
    own = write_run(tmp_path / "elsewhere" / "r")
    archive = Archive(runs_dir, own)
    assert [found.folder for found in archive.runs()] == [own]


@pytest.mark.parametrize("name", ["..", "../a", "a/..", "/etc", "", ".", "a/attempts/1", "b", "A"])
def test_a_name_that_is_not_in_the_list_is_no_run(runs_dir: Path, name: str) -> None:
    write_run(runs_dir / "a")
    write_run(runs_dir / "a" / "attempts" / "1", steps=1)
    archive = Archive(runs_dir / ".." / "runs")
    assert archive.folder(name, 0) is None
    assert archive.folder("a", 2) is None


def test_links_are_not_followed(runs_dir: Path, tmp_path: Path) -> None:
    outside = write_run(tmp_path / "outside")
    write_run(runs_dir / "a")
    (runs_dir / "link").symlink_to(outside)
    (runs_dir / "a" / "attempts").mkdir()
    (runs_dir / "a" / "attempts" / "1").symlink_to(outside)
    archive = Archive(runs_dir)
    assert listed(archive) == [("a", 0, "done")]
    assert archive.folder("link", 0) is None
    assert archive.folder("a", 1) is None


def test_the_error_that_ended_a_run_is_told_whole(runs_dir: Path) -> None:
    report = ErrorReport(kind="WorkerDied", what="the trainer service died", got="killed by SIGKILL", do="Look.")
    write_run(runs_dir / "a", error=report)
    (found,) = Archive(runs_dir).runs()
    assert found.summary.state.value == "failed"
    assert found.schedule == "overlap"
    assert found.error is not None
    assert (found.error.error, found.error.service, found.error.step) == (report, "trainer[0:0]", 3)


def test_a_journal_that_cannot_be_read_is_a_state_of_its_run(runs_dir: Path) -> None:
    write_run(runs_dir / "a")
    (runs_dir / "b").mkdir()
    (runs_dir / "b" / "journal.sqlite").write_bytes(b"no database" * 1000)
    assert listed(Archive(runs_dir)) == [("a", 0, "done"), ("b", 0, "unreadable")]


def test_a_run_that_ended_is_looked_at_again_when_its_journal_changes(runs_dir: Path) -> None:
    write_run(runs_dir / "a", steps=1)
    archive = Archive(runs_dir)
    assert [found.summary.iterations for found in archive.runs()] == [1]
    (runs_dir / "a" / "journal.sqlite").unlink()
    write_run(runs_dir / "a", steps=2)
    assert [found.summary.iterations for found in archive.runs()] == [2]


def test_what_may_not_be_looked_at_and_what_is_anothers_is_left_out(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "closed"):
        write_run(runs_dir / name)

    def refusing(path: Path) -> bool:
        if path.name == "closed":
            raise PermissionError(path)
        return is_run(path)

    monkeypatch.setattr(runs, "is_run", refusing)
    assert listed(Archive(runs_dir)) == [("a", 0, "done")]
    monkeypatch.setattr("os.geteuid", lambda: 12_345)
    assert listed(Archive(runs_dir)) == []


def test_no_folder_means_no_runs(runs_dir: Path) -> None:
    assert Archive(runs_dir).runs() == []


def test_a_journal_or_numbers_that_are_links_are_not_followed(runs_dir: Path, tmp_path: Path) -> None:
    outside = write_run(tmp_path / "outside")
    for place in (runs_dir / "a", runs_dir / "b" / "attempts" / "1"):
        place.mkdir(parents=True)
        (place / "journal.sqlite").symlink_to(outside / "journal.sqlite")
    write_run(runs_dir / "b")
    assert listed(Archive(runs_dir)) == [("b", 0, "done")]
    (runs_dir / "b" / "metrics.jsonl").unlink()
    (runs_dir / "b" / "metrics.jsonl").symlink_to(outside / "metrics.jsonl")
    assert read_columns(runs_dir / "b", ["reward"], points=10).rows == 0
    with pytest.raises(JournalError, match="has no journal"):
        read_timeline(runs_dir / "a", None, 1)


def test_attempts_that_may_not_be_looked_at_are_none(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(runs_dir / "a")
    (runs_dir / "a" / "attempts").mkdir()
    plain = Path.iterdir

    def refusing(path: Path) -> Iterator[Path]:
        if path.name == "attempts":
            raise PermissionError(path)
        return plain(path)

    monkeypatch.setattr(Path, "iterdir", refusing)
    assert listed(Archive(runs_dir)) == [("a", 0, "done")]
