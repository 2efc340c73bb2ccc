"""What an earlier run left in a run directory is kept, whole, beside the new run's records."""

from __future__ import annotations

from pathlib import Path

from rollplex_coordinator.records.attempts import set_aside


def leave(run_dir: Path, text: str) -> None:
    """The records of a run."""
    for name in (
        "journal.sqlite",
        "journal.sqlite-wal",
        "metrics.jsonl",
        "eval.jsonl",
        "completions.jsonl",
        "http.json",
    ):
        (run_dir / name).write_text(text)
    for name in ("logs", "checkpoints/step_1", "tensorboard", "samples"):
        (run_dir / name).mkdir(parents=True)
        (run_dir / name / "file").write_text(text)


def test_a_new_run_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    assert set_aside(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_records_move_together_and_everything_else_stays(tmp_path: Path) -> None:
    leave(tmp_path, "first")
    for name in ("secret", "token", "config.yaml", "lock"):
        (tmp_path / name).write_text("stays")
    (tmp_path / "sockets").mkdir()
    folder = tmp_path / "attempts" / "1"
    assert set_aside(tmp_path) == folder
    assert {path.name for path in tmp_path.iterdir()} == {
        "secret", "token", "config.yaml", "lock", "sockets", "attempts",
    }  # fmt: skip
    assert (folder / "checkpoints" / "step_1" / "file").read_text() == "first"
    assert {path.name for path in folder.iterdir()} == {
        "journal.sqlite", "journal.sqlite-wal", "metrics.jsonl", "eval.jsonl", "completions.jsonl", "http.json", "logs",
        "checkpoints", "tensorboard", "samples",
    }  # fmt: skip


def test_each_run_s_records_have_a_folder_of_their_own_and_none_is_overwritten(tmp_path: Path) -> None:
    for number, text in enumerate(("first", "second", "third"), 1):
        leave(tmp_path, text)
        assert set_aside(tmp_path) == tmp_path / "attempts" / str(number)
    kept = {path.name: (path / "metrics.jsonl").read_text() for path in (tmp_path / "attempts").iterdir()}
    assert kept == {"1": "first", "2": "second", "3": "third"}


def test_numbers_go_on_after_the_highest_and_strangers_do_not_matter(tmp_path: Path) -> None:
    for name in ("2", "11", "notes"):
        (tmp_path / "attempts" / name).mkdir(parents=True)
    leave(tmp_path, "x")
    assert set_aside(tmp_path) == tmp_path / "attempts" / "12"
