"""`python -m rollplex.demo`: the folder without a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.config.loading import load
from rollplex.demo.__main__ import main
from rollplex.demo.recipe import QUICK_DIGITS


def test_the_command_writes_a_folder_that_a_run_can_start_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "digits"
    assert main([str(folder), "--quick"]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "config.yaml")
    config = load(folder / "config.yaml")
    assert config.run.name == "digits-quick"
    assert config.model.path == folder / "model"
    answers = {line.split('"answer": "')[1][0] for line in config.data.path.read_text().splitlines()}
    assert answers == set(map(str, QUICK_DIGITS))


def test_a_folder_that_cannot_be_written_is_one_line_on_the_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file" / "digits")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
