"""`rollplex demo`: what it writes, starts and says. The coordinator here is a stand-in that leaves the run's files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollplex.cli import demo as module
from rollplex.cli.app import run
from rollplex.cli.demo import run_demo
from rollplex.cli.start import Prepared, coordinator_command
from rollplex.config import load
from rollplex.errors import DataError

_STAND_IN = """
import json, sys
from pathlib import Path
from rollplex.config import load
run_dir, code, evals, steps = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
config = load(run_dir / "config.yaml")
assert config.data.path.is_file() and config.model.path.is_dir()
(run_dir / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "reward": 0.1}) + "\\n" for s in range(steps)))
(run_dir / "eval.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in evals))
sys.exit(code)
"""


def _row(name: str, step: int, accuracy: float, count: float = 156.0) -> dict[str, Any]:
    return {
        "name": name,
        "step": step,
        "version": step,
        "reward": 0.9,
        "count": count,
        "rewards/digit_reward/mean": 0.9,
        "rewards/right/mean": accuracy,
    }


_ROWS = [
    _row("held_out", 0, 0.01),
    _row("held_out", 200, 0.5),
    _row("held_out", 400, 0.9744),
    _row("held_out_grey", 400, 0.2628),
]


@pytest.fixture
def started() -> list[Prepared]:
    """The runs that a demo prepared."""
    return []


@pytest.fixture
def play(started: list[Prepared], tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run the quick demo with a coordinator that leaves `rows` and `steps`, and ends with `code`."""

    def run_it(rows: list[dict[str, Any]], *, steps: int = 400, code: int = 0) -> tuple[int, str]:
        def command(prepared: Prepared) -> list[str]:
            started.append(prepared)
            stand_in = [sys.executable, "-c", _STAND_IN]
            return [*stand_in, str(prepared.run_dir), str(code), json.dumps(rows), str(steps)]

        lines: list[str] = []
        folder = tmp_path / "d"
        found = run_demo(folder, quick=True, runs_dir=tmp_path / "runs", say=lines.append, command=command)
        return found, "\n".join(lines)

    return run_it


def test_the_summary_has_accuracy_before_and_after_the_control_and_the_place(
    play: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    code, text = play(_ROWS)
    assert code == 0
    assert "564 scans of the digits 0, 1, 4, 7 to learn from, 156 held out" in text
    assert "held-out accuracy   0.010 after 0, 0.974 after 400 iterations (156 scans; blind guessing 0.250)" in text
    assert "on grey pictures    0.263 after 400 iterations (156 scans;" in text
    assert "iterations          400\n" in text
    assert f"run directory       {tmp_path / 'd/run'}" in text


def test_accuracy_is_the_share_of_right_answers_not_the_shaped_reward(play: Callable[..., tuple[int, str]]) -> None:
    _, text = play([_row("held_out", 400, 0.125)])
    assert "0.125" in text
    assert "0.900" not in text


def test_a_second_demo_in_the_folder_gets_its_own_run_directory(
    play: Callable[..., tuple[int, str]], started: list[Prepared], tmp_path: Path
) -> None:
    play(_ROWS)
    play(_ROWS)
    assert [prepared.run_dir for prepared in started] == [tmp_path / "d/run", tmp_path / "d/run-2"]


def test_a_run_that_ended_early_says_so_and_keeps_its_exit_code(play: Callable[..., tuple[int, str]]) -> None:
    code, text = play(_ROWS[:1], steps=30, code=130)
    assert code == 130
    assert "30 of 400; it ended early" in text
    assert "held-out accuracy   0.010 after 0 iterations" in text
    assert "grey" not in text


def test_a_run_that_left_nothing_says_so(play: Callable[..., tuple[int, str]]) -> None:
    code, text = play([], steps=0, code=1)
    assert code == 1
    assert "no evaluation was made" in text


def test_an_evaluation_without_the_accuracy_is_an_error(play: Callable[..., tuple[int, str]]) -> None:
    row = _row("held_out", 400, 0.5)
    del row["rewards/right/mean"]
    with pytest.raises(DataError, match="rewards/right/mean"):
        play([row])


@pytest.mark.parametrize(("text", "part"), [("nonsense\n", "not JSON"), ("[1]\n", "not a JSON object")])
def test_a_damaged_line_is_an_error_with_its_place(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "eval.jsonl"
    file.write_text("{}\n" + text)
    with pytest.raises(DataError, match=part) as caught:
        list(module._rows(file))
    assert caught.value.where == f"{file}:2"


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n{"step"')
    assert list(module._rows(file)) == [{"step": 0}]


def test_the_demos_coordinator_dies_with_it(play: Callable[..., tuple[int, str]], started: list[Prepared]) -> None:
    play(_ROWS)
    command = coordinator_command(started[0], die_with_parent=True)
    assert command[1:3] == ["-m", "rollplex_coordinator"]
    assert command[-1] == "--die-with-parent"


def test_the_command_writes_starts_and_returns_the_childs_code(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []

    def child(command: list[str], **_: object) -> int:
        seen.append(command)
        return 130

    monkeypatch.setattr(module, "run_child", child)
    assert run(["demo", "--quick"]) == 130
    run_dir = Path(seen[0][seen[0].index("--run-dir") + 1])
    assert run_dir.name == "run"
    assert run_dir.parent.parent == runs_dir
    assert run_dir.parent.name.startswith("demo-")
    assert load(run_dir / "config.yaml").run.name == "digits-quick"
    assert "no evaluation was made" in capsys.readouterr().out


def test_a_folder_whose_path_is_too_long_for_sockets_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["demo", "--quick", "--dir", str(tmp_path / ("x" * 100))]) == 2
    assert "too long for a unix socket" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_line_and_code_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run(["demo", "--quick", "--dir", str(tmp_path / "file")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "Traceback" not in err
