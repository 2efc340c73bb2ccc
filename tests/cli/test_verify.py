"""`rollplex verify`: from arguments to the coordinator's command line, and from its report to words and exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from rollplex.cli.app import run
from rollplex.cli.start import Prepared
from rollplex.cli.verify import REPORT_FILE, Wanted, run_verify, verify_command
from rollplex.config import load
from rollplex.errors import RollplexError
from rollplex.latest import NAME as LATEST
from rollplex.verify.report import Comparison, LogprobDifference, Report, read
from rollplex_coordinator.options import VerifyOptions, parse_options

REPORT = Report(
    passed=True,
    config="runs/verify/config.yaml",
    data="rows.jsonl",
    row=4,
    group_size=2,
    prompt_tokens=31,
    media=0,
    response_tokens=(5, 9),
    dtype="float32",
    comparisons=(
        Comparison(
            name="rollout against trainer",
            passed=True,
            logprobs=LogprobDifference(largest=2e-6, tolerance=1e-4, sample=0, position=7, tokens=14, beyond=0),
            gradients=None,
        ),
    ),
)

Program = Callable[[str], list[str]]
Verify = Callable[..., int]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def verify(config_file: Path, runs_dir: Path, program: Program, said: list[str]) -> Verify:
    """With a coordinator that writes a report (or none) and ends with a code."""

    def begin(report: Report | None, code: int, wanted: Wanted | None = None) -> int:
        def command(prepared: Prepared, _: Wanted) -> list[str]:
            text = "take(signal.SIG_DFL)\n"
            if report is not None:
                content = msgspec.json.encode(report).decode()
                text += f"open({str(prepared.run_dir / REPORT_FILE)!r}, 'w').write({content!r})\n"
            return program(text + f"sys.exit({code})\n")

        return run_verify(config_file, [], wanted or Wanted(), runs_dir=runs_dir, say=said.append, command=command)

    return begin


def test_what_is_wanted_reaches_the_coordinator(config_file: Path, tmp_path: Path) -> None:
    prepared = Prepared(config=load(config_file), config_file=config_file, run_dir=tmp_path / "r")
    wanted = Wanted(row=7, logprob_tolerance=0.5, gradient_tolerance=0.0)
    command = verify_command(prepared, wanted)
    assert command[:4] == [sys.executable, "-P", "-m", "rollplex_coordinator"]
    options = parse_options(command[4:])
    assert options.die_with_parent
    assert options.verify == VerifyOptions(
        report=tmp_path / "r" / REPORT_FILE, row=7, logprob_tolerance=0.5, gradient_tolerance=0.0
    )
    options = parse_options(verify_command(prepared, Wanted())[4:])
    assert options.verify == VerifyOptions(report=tmp_path / "r" / REPORT_FILE)


@pytest.mark.parametrize("extra", [["--iterations", "3"], ["--serve"]])
def test_a_verification_runs_no_iterations(extra: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(["--config", "c", "--run-dir", "r", "--verify", "v.json", *extra])
    assert caught.value.code == 2
    assert "--verify runs no iterations" in capsys.readouterr().err


def test_a_run_directory_is_left_only_if_something_is_wrong_or_it_is_wanted(
    verify: Verify, runs_dir: Path, said: list[str]
) -> None:
    assert verify(REPORT, 0) == 0
    assert list(runs_dir.iterdir()) == []
    assert said[-1] == "verified: all within tolerance"
    assert verify(REPORT, 0, Wanted(keep=True)) == 0
    (kept,) = runs_dir.iterdir()
    assert kept.name.startswith("verify-")
    assert said[-1] == f"run directory  {kept}"
    assert not (runs_dir / LATEST).is_symlink(), "a verification is nobody's latest run"


def test_a_difference_is_code_one_and_said_with_where_to_look(verify: Verify, runs_dir: Path, said: list[str]) -> None:
    bad = tuple(replace(comparison, passed=False) for comparison in REPORT.comparisons)
    assert verify(replace(REPORT, passed=False, comparisons=bad), 1) == 1
    (kept,) = runs_dir.iterdir()
    assert said[-2:] == ["NOT verified: rollout against trainer", f"run directory  {kept}"]


def test_a_report_that_does_not_pass_is_never_code_zero(verify: Verify) -> None:
    assert verify(replace(REPORT, passed=False), 0) == 1


@pytest.mark.parametrize("code", [1, 2, 130])
def test_a_coordinator_that_failed_before_its_report_gives_its_code(
    verify: Verify, runs_dir: Path, said: list[str], code: int
) -> None:
    assert verify(None, code) == code
    (kept,) = runs_dir.iterdir()
    assert said == [f"run directory  {kept}"]


def test_a_stop_from_outside_is_not_a_verification(verify: Verify) -> None:
    with pytest.raises(RollplexError, match="stopped before it was done"):
        verify(None, 0)


def test_the_report_goes_where_it_is_wanted_and_names_the_users_configuration(
    verify: Verify, config_file: Path, tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    assert verify(REPORT, 0, Wanted(json_file=file)) == 0
    assert read(file) == replace(REPORT, config=str(config_file))


def test_the_surface_of_the_command_is_the_known_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--help"]) == 0
    words = capsys.readouterr().out.replace(",", " ").split()
    assert {word for word in words if word.startswith("--")} == {
        "--set",
        "--row",
        "--json",
        "--logprob-tolerance",
        "--gradient-tolerance",
        "--keep",
        "--help",
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ["--row", "-1"],
        ["--logprob-tolerance", "-0.1"],
        ["--set", "run.sede=1"],
        ["--json", "no/such/folder/x.json"],
        ["--set", "device.kind=cuda"],
        [],
    ],
)
def test_what_cannot_run_is_code_two_before_anything_starts(
    arguments: list[str], config_file: Path, runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file if arguments else config_file.with_name("none.yaml")
    assert run(["verify", str(file), *arguments]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert list(runs_dir.iterdir()) == []
