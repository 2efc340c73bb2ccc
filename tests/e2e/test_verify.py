"""`rollplex verify` on real scans through real processes: it passes, it finds a planted error, it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollplex.journal.events import LeaseGranted, LeaseReleased, UpdateBegin
from rollplex.journal.reader import Reader
from rollplex.verify.report import Report, read
from support.nodes import Project, run_processes
from support.wrong_prefix import WRONG

COMMAND = (sys.executable, "-c", "import sys; from rollplex.cli import main; sys.exit(main())", "verify")
SUPPORT = Path(__file__).parents[1] / "support"
LENGTHS = [3, 12, 1, 7]

Verify = Callable[..., tuple[subprocess.CompletedProcess[str], Path]]


@pytest.fixture
def verify(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Verify:
    """Runs it on the project's data; also gives the runs folder."""

    def run(*arguments: str) -> tuple[subprocess.CompletedProcess[str], Path]:
        runs_dir = tmp_path_factory.mktemp("v")
        overrides = {"rollout.group_size": 4, "rollout.max_new_tokens": 12, "rollout.forced_lengths": LENGTHS}
        command = [*COMMAND, str(project.config), *arguments]
        for key, value in {**overrides, "memory.overhead": 0}.items():
            command += ["--set", f"{key}={json.dumps(value)}"]
        environment = {**os.environ, "ROLLPLEX_RUNS_DIR": str(runs_dir)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=environment)
        return done, runs_dir

    return run


def checks(report: Report) -> dict[str, bool]:
    return {comparison.name: comparison.passed for comparison in report.comparisons}


@pytest.mark.timeout(120)
def test_the_real_services_agree_and_nothing_is_left_but_the_report(
    verify: Verify, project: Project, tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    done, runs_dir = verify("--row", "5", "--json", str(file))
    assert done.returncode == 0, done.stderr + done.stdout
    report = read(file)
    assert (report.passed, report.config, report.row) == (True, str(project.config), 5)
    assert (report.group_size, report.response_tokens, report.media) == (4, tuple(LENGTHS), 1)
    assert checks(report) == dict.fromkeys(
        (
            "split against unsplit",
            "shared against replicated",
            "rollout against trainer",
            "reference against trainer",
        ),
        True,
    )
    for comparison in report.comparisons[:2]:
        assert comparison.gradients is not None
        assert (comparison.gradients.parameters, comparison.gradients.zero) == (57, 0)
        assert comparison.gradients.largest is not None
        assert 0.0 < comparison.gradients.largest < 1e-5, "computed differently, and the same"
    assert all(c.logprobs is not None and c.logprobs.tokens == sum(LENGTHS) for c in report.comparisons)
    assert "verified: all within tolerance" in done.stdout
    assert list(runs_dir.iterdir()) == []


@pytest.mark.timeout(120)
def test_a_gradient_that_is_counted_twice_is_found_and_its_parameter_named(verify: Verify) -> None:
    done, runs_dir = verify(
        "--set", f"services.prefix={json.dumps([sys.executable, str(SUPPORT / 'wrong_prefix.py')])}"
    )
    assert done.returncode == 1, done.stderr + done.stdout
    (run_dir,) = runs_dir.iterdir()
    assert f"run directory  {run_dir}" in done.stdout
    assert not run_processes(run_dir)
    report = read(run_dir / "verify.json")
    assert not report.passed
    assert [name for name, passed in checks(report).items() if not passed] == ["split against unsplit"]
    found = report.comparisons[0]
    assert found.logprobs is not None
    assert found.logprobs.passed
    assert found.gradients is not None
    assert found.gradients.parameter == WRONG.replace("model.", "model.language_model.")
    assert found.gradients.beyond == 1
    assert f"{found.gradients.parameter} (57 parameters, 1 beyond)  BEYOND" in done.stdout
    with Reader(run_dir / "journal.sqlite") as reader:
        events = [record.event for record in reader.events_after(0, 10_000)]
    assert not any(isinstance(event, UpdateBegin) for event in events)
    sizes = {event.lease: event.size_bytes for event in events if isinstance(event, LeaseGranted)}
    measured = {e.lease: e.held_bytes for e in events if isinstance(e, LeaseReleased) and e.held_bytes is not None}
    assert len(measured) >= 8
    for lease, held_bytes in measured.items():
        assert held_bytes <= 1.05 * sizes[lease]


@pytest.mark.timeout(120)
def test_a_row_that_is_not_there_is_refused_before_anything_is_loaded(verify: Verify) -> None:
    done, _ = verify("--row", "100000")
    assert done.returncode == 2
    assert "There is no such row" in done.stderr
    assert "phase LOAD" in done.stderr
    assert done.stdout.startswith("run directory  ")
