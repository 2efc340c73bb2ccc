"""The command: what it writes, what it says, and how it ends."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from rollplex.cli.app import run
from rollplex.errors import ConfigError, RollplexError
from rollplex.trace import run as trace_run
from rollplex.trace.query import read
from rollplex.trace.run import write_trace
from rollplex.trace.validate import problems
from support.journals import STEP_S, JournalScript, run_of


def told(run_dir: Path, *, steps: str | None = None, output: Path | None = None, svg: Path | None = None) -> list[str]:
    lines: list[str] = []
    write_trace(run_dir, steps=steps, output=output, svg=svg, say=lines.append)
    return lines


def steps_in(path: Path) -> list[str]:
    return [one.name for one in read(path).on("iterations")]


def test_the_trace_lies_in_the_run_directory_and_both_tables_are_printed(run_dir: Path) -> None:
    lines = told(run_dir)
    path = run_dir / "trace.perfetto-trace"
    assert lines[0].startswith(f"{path}: iterations 0 to 3, ")
    assert "https://ui.perfetto.dev" in lines[0]
    assert [line for line in lines if line.startswith("where the time")] == [
        "where the time of an iteration goes: median of 4 iterations, ms",
        "where the time before the first iteration goes, s",
    ]
    assert problems(path) == []
    assert [entry.name for entry in run_dir.iterdir() if entry.name.startswith(".")] == []


def test_chosen_iterations_are_in_the_file_and_the_rest_is_told(run_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "few"
    lines = told(run_dir, steps="1:3", output=output)
    assert lines[1] == "left out: 2 of 4 iterations (0, 3); --steps A:B chooses"
    assert steps_in(output) == ["iteration 1", "iteration 2"]
    assert problems(output) == []
    assert not (run_dir / "trace.perfetto-trace").exists()


def test_of_a_very_long_run_the_newest_iterations_are_taken(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_run, "MAX_ITERATIONS", 3)
    assert "left out: 1 of 4 iterations (0); --steps A:B chooses" in told(run_dir)
    assert steps_in(run_dir / "trace.perfetto-trace") == ["iteration 1", "iteration 2", "iteration 3"]


def test_the_picture_shows_two_typical_iterations_unless_told_otherwise(run_dir: Path, tmp_path: Path) -> None:
    svg = tmp_path / "timeline.svg"
    assert f"{svg}: iterations 1 to 2" in told(run_dir, svg=svg)  # before 0 there was a longer pause
    assert f"{svg}: iteration 3" in told(run_dir, svg=svg, steps="3")
    assert ET.parse(svg).getroot().tag.endswith("svg")  # noqa: S314 - our own file


def test_typical_are_neighbours_of_median_length(tmp_path: Path) -> None:
    with JournalScript(tmp_path / "run") as script:
        at_s = 1.0
        for step in range(9):
            at_s += STEP_S + (0.5 if step in {4, 6} else 0.0)
            script.iteration(step, at_s)
    lines = told(tmp_path / "run", svg=tmp_path / "t.svg")
    assert f"{tmp_path / 't.svg'}: iterations 7 to 8" in lines


def test_an_error_leaves_an_older_file_as_it_was(run_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "t"
    output.write_text("older")
    with pytest.raises(ConfigError, match="iterations 0 to 3"):
        told(run_dir, steps="7:", output=output)
    assert output.read_text() == "older"
    with pytest.raises(RollplexError, match="cannot write"):
        told(run_dir, output=tmp_path / "missing" / "t")


def test_too_many_iterations_for_a_picture_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    run_of(tmp_path / "run", 21)
    with pytest.raises(ConfigError, match="1 to 20"):
        told(tmp_path / "run", steps="0:21", output=tmp_path / "t", svg=tmp_path / "t.svg")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_a_run_that_still_goes_on_can_be_traced(tmp_path: Path) -> None:
    with JournalScript(tmp_path / "run") as script:
        script.start(1.0)
        script.iteration(0, 2.0)
        script.iteration(1, 2.2, upto=0.08)
        lines = told(tmp_path / "run")
        assert "iterations 0 to 1" in lines[0]
        script.iteration(2, 3.0)
    assert problems(tmp_path / "run" / "trace.perfetto-trace") == []


def test_on_the_command_line_it_is_found_by_its_name(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLPLEX_RUNS_DIR", str(run_dir.parent))
    assert run(["trace", "run", "--steps", "0:2"]) == 0
    assert "iterations 0 to 1" in capsys.readouterr().out
    assert run(["trace"]) == 0
    assert run(["trace", "--steps", "x"]) == 2
    assert run(["trace", "other"]) == 2
    (run_dir / "journal.sqlite").write_bytes(b"")
    assert run(["trace", "run"]) == 1
    assert "this run has no journal" in capsys.readouterr().err
