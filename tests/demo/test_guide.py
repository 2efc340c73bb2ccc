"""Where the files are, and commands that can be typed as they are."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from rollplex.cli.app import run
from rollplex.demo.guide import file_lines, newest_checkpoint, next_commands, next_lines


def test_only_what_is_there_is_listed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    assert [line.split() for line in file_lines(run_dir, None) if line.startswith("  ")] == [
        ["run", "directory", str(run_dir)]
    ]
    (run_dir / "metrics.jsonl").touch()
    (run_dir / "tensorboard").mkdir()
    text = "\n".join(file_lines(run_dir, tmp_path / "not-drawn.png"))
    assert str(run_dir / "tensorboard") in text
    assert "metrics.jsonl" in text
    assert "not-drawn" not in text


def test_the_newest_checkpoint_is_that_of_the_most_iterations(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for name in ("step_99", "step_400", "step_1000", "step_x", ".tmp-step_2000-ab"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoints/step_1000"


def test_paths_inside_the_current_folder_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/demo/run").mkdir(parents=True)
    assert file_lines(tmp_path / "runs/demo/run", None)[-1].split()[-1] == "runs/demo/run"


def test_every_command_of_the_guide_is_one_that_the_command_line_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = next_lines(tmp_path / "a folder/config.yaml", "demo/run", program=".venv/bin/rollplex")
    commands = list(next_commands(tmp_path / "a folder/config.yaml", "demo/run"))
    for arguments, what in commands:
        assert run([*arguments, "--help"]) == 0  # reads them all, runs nothing
        assert said[said.index(f"  {shlex.join(['.venv/bin/rollplex', *arguments])}") + 1].strip() == what
    assert len(commands) == 4
    assert run(["trace", "demo/run", "--stepz", "100:120", "--help"]) == 2  # so a wrong one would be found
    capsys.readouterr()
