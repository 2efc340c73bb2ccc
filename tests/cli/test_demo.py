"""`rollplex demo`: what it writes, starts and says. The coordinator here is a stand-in that leaves the run's files."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from rollplex.cli import demo as module
from rollplex.cli.app import run
from rollplex.cli.demo import run_demo, screen_of_stdout
from rollplex.cli.start import Prepared, coordinator_command
from rollplex.config import load
from rollplex.demo.picture import Screen
from rollplex.errors import DataError, ServiceDied
from rollplex.protocol.claim import claim
from rollplex.verify.report import Report, read
from support.reports import make_report

# Leaves eval.jsonl and metrics.jsonl, and completions.jsonl with a right answer to every row but every tenth.
_STAND_IN = """
import json, os, shutil, sys
from pathlib import Path
from rollplex.config import load
run_dir, code, evals, steps = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
config = load(run_dir / "config.yaml")
assert config.data.path.is_file() and config.model.path.is_dir()
times = {"time/prefix_in_window": 0.75, "time/rollout_s": 0.03, "time/step_s": 0.07}
rows = [{"step": s, "reward": 0.1, **times} for s in range(steps)]
answers = []
for row in (evals if "answers" in sys.argv else []):
    source = next(e.data for e in config.eval if e.name == row["name"])
    for index, line in enumerate(source.read_text().splitlines()):
        truth = json.loads(line)["answer"]
        right = float(index % 10 != 9)
        answers.append({"source": row["name"], "step": row["step"], "row": index, "sample": 0,
                        "completion": truth if right else "9", "rewards": {"right": right}})
for name, lines in (("metrics", rows), ("eval", evals), ("completions", answers)):
    if lines:
        (run_dir / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
if steps == config.run.iterations:
    shutil.copytree(config.model.path, run_dir / f"checkpoints/step_{steps}")
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""

# Leaves the report that it was given, if any.
_VERIFIER = """
import sys
from pathlib import Path
run_dir, code, report = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if report:
    (run_dir / "verify.json").write_text(report)
print("a verifier's story")
sys.exit(code)
"""


def _row(name: str, step: int, accuracy: float) -> dict[str, Any]:
    means = {"rewards/digit_reward/mean": 0.9, "rewards/right/mean": accuracy}
    return {"name": name, "step": step, "version": step, "reward": 0.9, "count": 156.0, **means}


_BEFORE = _row("held_out", 0, 0.01)
_GOOD = [_BEFORE, _row("held_out", 200, 0.5), _row("held_out", 400, 0.9744), _row("held_out_grey", 400, 0.2628)]


@dataclass
class Stage:
    """Plays quick demos in one folder with a stand-in for the coordinator."""

    tmp_path: Path
    started: list[Prepared] = field(default_factory=list)
    verified: list[Prepared] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    report: Report | None = field(default_factory=make_report)
    verify_code: int = 0

    @property
    def text(self) -> str:
        return "\n".join(self.said)

    def play(self, rows: list[dict[str, Any]], *, steps: int = 400, code: int = 0, answers: bool = True) -> int:
        """Run it with a coordinator that leaves `rows` and `steps`, and ends with `code`, or by signal -`code`."""

        def command(prepared: Prepared) -> list[str]:
            self.started.append(prepared)
            stand_in = [sys.executable, "-c", _STAND_IN, str(prepared.run_dir), str(code), json.dumps(rows)]
            return [*stand_in, str(steps), *(["answers"] if answers else [])]

        def verify(prepared: Prepared) -> list[str]:
            self.verified.append(prepared)
            report = "" if self.report is None else msgspec.json.encode(self.report).decode()
            return [sys.executable, "-c", _VERIFIER, str(prepared.run_dir), str(self.verify_code), report]

        self.said.clear()
        screen = Screen(width=100, is_unicode=True, has_colours=False)
        return run_demo(
            self.tmp_path / "d",
            quick=True,
            runs_dir=self.tmp_path / "runs",
            say=self.said.append,
            screen=screen,
            command=command,
            verify_command=verify,
        )


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """A demo that went well."""
    stage = Stage(tmp_path_factory.mktemp("g"))
    assert stage.play(_GOOD) == 0
    return stage


def test_the_opening_says_what_will_happen_with_what_and_how_long_it_takes(good: Stage) -> None:
    opening = good.text.partition("Result")[0]
    for part in ("372,544 parameters", "0, 1, 4, 7", "564 to learn from, 156 held out", "400 iterations", "minute"):
        assert part in opening
    assert "no GPU, no network" in opening
    assert str(good.tmp_path / "d") in opening


def test_the_end_has_accuracy_before_and_after_and_the_control(good: Stage) -> None:
    assert "0.010 before, 0.974 after 400 iterations (156 scans; blind guessing 0.250)" in good.text
    assert "0.263: stays at chance, as it must" in good.text
    assert "PASS  held-out accuracy 0.974 (promised: at least 0.85)" in good.text
    assert "PASS  grey pictures 0.263 (promised: below 0.40)" in good.text
    assert "FAIL" not in good.text


def test_scans_are_shown_with_the_models_answers_and_as_a_picture_file(good: Stage) -> None:
    assert "8 of these scans, 2 of the 15 mistakes among them; the digit that was answered:" in good.text
    verdicts = next(line for line in good.said if "✓" in line)
    assert (verdicts.count("✓"), verdicts.count("✗")) == (6, 2)
    with Image.open(good.tmp_path / "d/answers.png") as sheet:
        assert sheet.width == 992
    assert "answers.png" in good.text


def test_a_run_that_kept_no_answers_says_so_and_is_as_good(stage: Stage) -> None:
    assert stage.play(_GOOD, answers=False) == 0
    assert "the run kept no answers" in stage.text
    assert not (stage.tmp_path / "d/answers.png").exists()


def test_the_end_says_where_the_time_went_and_where_the_files_are(good: Stage) -> None:
    assert "75% of the prefix work" in good.text
    assert f"run directory       {good.tmp_path / 'd/run'}" in good.text
    assert f"metrics             {good.tmp_path / 'd/run/metrics.jsonl'}" in good.text


def test_the_output_stays_within_a_hundred_columns_but_for_paths(good: Stage) -> None:
    assert [line for line in good.said if len(line) > 104 and str(good.tmp_path) not in line] == []


@pytest.mark.parametrize(
    ("held_out", "grey", "broken"),
    [
        (0.84, 0.25, "FAIL  held-out accuracy 0.840 (promised: at least 0.85)"),
        (0.95, 0.41, "FAIL  grey pictures 0.410 (promised: below 0.40)"),
    ],
)
def test_a_complete_run_that_breaks_a_promise_is_a_failure(
    stage: Stage, held_out: float, grey: float, broken: str
) -> None:
    code = stage.play([_BEFORE, _row("held_out", 400, held_out), _row("held_out_grey", 400, grey)])
    assert code == 1
    assert broken in stage.text
    assert stage.text.count("FAIL") == 1
    assert "The run is complete, but" in stage.text
    assert ("stays at chance" in stage.text) == (grey < 0.4)


def test_a_complete_run_without_an_evaluation_breaks_both_promises(stage: Stage) -> None:
    assert stage.play([]) == 1
    assert "FAIL  held-out accuracy not measured" in stage.text
    assert "FAIL  grey pictures not measured" in stage.text


def test_an_interrupted_run_says_what_there_is_and_judges_nothing(stage: Stage) -> None:
    assert stage.play([_BEFORE], steps=30, code=130) == 130
    assert "30 of 400; it ended early" in stage.text
    assert "held-out accuracy   0.010 after 0 iterations" in stage.text
    assert "answers.png" in stage.text
    assert str(stage.tmp_path / "d/run") in stage.text
    for absent in ("grey pictures ", "PASS", "FAIL", "Next"):
        assert absent not in stage.text.partition("Result")[2]


def test_a_run_that_left_nothing_says_so_and_keeps_its_exit_code(stage: Stage) -> None:
    assert stage.play([], steps=0, code=2) == 2
    assert "no evaluation was made" in stage.text


def test_a_stopped_run_is_no_failure(stage: Stage) -> None:
    assert stage.play([_BEFORE], steps=30, code=0) == 0
    assert "FAIL" not in stage.text


def test_when_the_coordinator_is_killed_what_there_is_is_said_before_the_error(stage: Stage) -> None:
    with pytest.raises(ServiceDied, match="SIGKILL"):
        stage.play([_BEFORE], steps=30, code=-9)
    assert "30 of 400; it ended early" in stage.text


def test_an_evaluation_without_the_accuracy_is_an_error(stage: Stage) -> None:
    row = _row("held_out", 400, 0.5)
    del row["rewards/right/mean"]
    with pytest.raises(DataError, match="rewards/right/mean"):
        stage.play([row])


def test_the_trained_weights_are_verified_quietly_and_the_report_stays(
    stage: Stage, capfd: pytest.CaptureFixture[str]
) -> None:
    assert stage.play(_GOOD) == 0
    assert [prepared.config.model.path for prepared in stage.verified] == [
        stage.tmp_path / "d/run/checkpoints/step_400"
    ]
    assert "split against unsplit      log-probabilities within 2e-06, gradients within 3e-06" in stage.text
    assert "PASS  split and unsplit computation agree" in stage.text
    assert read(stage.tmp_path / "d/run/verify.json") == stage.report
    assert not (stage.tmp_path / "d/check").exists()
    assert "a verifier's story" not in "".join(capfd.readouterr())


def test_computations_that_differ_are_a_failure_whose_place_is_said(stage: Stage) -> None:
    stage.report, stage.verify_code = make_report(gradients=0.5), 1
    assert stage.play(_GOOD) == 1
    assert "gradients 0.5 APART" in stage.text
    assert "FAIL  split and unsplit computation differ" in stage.text
    assert stage.text.count("FAIL") == 1
    assert (stage.tmp_path / "d/check/output.log").read_text() == "a verifier's story\n"
    assert str(stage.tmp_path / "d/check") in stage.text


@pytest.mark.parametrize("code", [130, 0])
def test_a_verification_without_a_report_proves_nothing_and_its_code_is_the_demos(stage: Stage, code: int) -> None:
    stage.report, stage.verify_code = None, code
    assert stage.play(_GOOD) == code
    assert "----  split and unsplit computation were not compared" in stage.text
    assert f"exit code {code}" in stage.text
    assert str(stage.tmp_path / "d/check/output.log") in stage.text


def test_a_broken_promise_outweighs_a_verification_that_was_interrupted(stage: Stage) -> None:
    stage.report, stage.verify_code = None, 130
    assert stage.play([_BEFORE, _row("held_out", 400, 0.3), _row("held_out_grey", 400, 0.25)]) == 1


def test_only_a_complete_run_is_verified(stage: Stage) -> None:
    stage.play([_BEFORE], steps=30, code=130)
    stage.play([_BEFORE], steps=30, code=0)
    assert stage.verified == []


def test_a_second_demo_in_the_folder_leaves_the_first_ones_files(stage: Stage) -> None:
    stage.play(_GOOD)
    first = (stage.tmp_path / "d/answers.png").read_bytes()
    assert stage.play([_BEFORE], steps=3) == 0
    assert [prepared.run_dir.name for prepared in stage.started] == ["run", "run-2"]
    assert (stage.tmp_path / "d/answers.png").read_bytes() == first
    assert (stage.tmp_path / "d/answers-2.png").is_file()
    assert str(stage.tmp_path / "d/run-2") in stage.text


def test_a_folder_in_which_a_demo_runs_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with claim(tmp_path / "d/run", "digits-quick"):
        assert run(["demo", "--quick", "--dir", str(tmp_path / "d")]) == 2
    said = capsys.readouterr()
    assert "A demo is running in this folder" in said.err
    assert "run digits-quick" in said.err
    assert said.out == ""
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["run"]


def test_the_demos_coordinator_dies_with_it(good: Stage) -> None:
    command = coordinator_command(good.started[0], die_with_parent=True)
    assert command[1:4] == ["-P", "-m", "rollplex_coordinator"]
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


@pytest.mark.parametrize(("encoding", "is_unicode"), [("utf-8", True), ("ascii", False), ("latin-1", False)])
def test_an_output_that_is_no_terminal_gets_no_colours_and_blocks_only_in_utf_8(
    monkeypatch: pytest.MonkeyPatch, encoding: str, is_unicode: bool
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    screen = screen_of_stdout()
    assert (screen.is_unicode, screen.has_colours) == (is_unicode, False)
