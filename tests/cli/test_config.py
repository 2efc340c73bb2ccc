"""`rollplex config show`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.cli.app import run
from rollplex.cli.start import prepare
from rollplex.config import load

Said = pytest.CaptureFixture[str]


def test_a_file_is_written_out_with_every_default_and_means_the_same(
    config_file: Path, tmp_path: Path, capsys: Said
) -> None:
    assert run(["config", "show", str(config_file), "--set", "run.seed=7"]) == 0
    text = capsys.readouterr().out
    assert "group_size: 8" in text
    out = tmp_path / "out.yaml"
    out.write_text(text)
    assert load(out) == load(config_file, ["run.seed=7"])


def test_files_that_it_names_need_not_be_there(config_file: Path, capsys: Said) -> None:
    (config_file.parent / "rows.jsonl").unlink()
    assert run(["config", "show", str(config_file)]) == 0
    assert str(config_file.parent / "rows.jsonl") in capsys.readouterr().out


def test_of_a_run_it_is_what_the_run_was_started_with(config_file: Path, runs_dir: Path, capsys: Said) -> None:
    prepared = prepare(config_file, ["run.seed=3"], runs_dir / "a-1", runs_dir)
    assert run(["config", "show", "a-1"]) == 0
    assert capsys.readouterr().out == prepared.config_file.read_text()
    assert run(["config", "show", "a-1", "--set", "run.seed=4"]) == 0
    assert "seed: 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "part"), [(["none.yaml"], "There is no such run; got none.yaml"), (["FILE", "--set", "x.y=1"], "x")]
)
def test_what_cannot_be_shown_is_one_line_and_code_two(
    config_file: Path, runs_dir: Path, capsys: Said, arguments: list[str], part: str
) -> None:
    given = [str(config_file) if argument == "FILE" else argument for argument in arguments]
    assert run(["config", "show", *given]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert part in err
