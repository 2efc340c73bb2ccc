"""`rollplex doctor`: the report of this machine, its form, and what it does not tell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollplex.cli.app import run
from rollplex.cli.doctor import report
from rollplex.cli.doctor.finding import Finding, note, ok, problem
from rollplex.config.environment import Environment, read_environment


def test_this_machine_can_run_rollplex(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path_factory.mktemp("h")  # a short path: runs must have room for their names
    monkeypatch.chdir(here)
    findings = report.examine(read_environment({"HOME": "/nowhere"}))
    topics = [finding.topic for finding in findings]
    for topic in ("rollplex", "libraries", "python", "cores", "memory", "segments", "descriptors", "gpu", "docker"):
        assert topic in topics
    assert report.well(findings), report.lines(findings)
    assert list(here.iterdir()) == []


def test_a_report_has_a_line_for_each_finding_and_what_to_do_under_it() -> None:
    findings = [ok("python", "3.11"), note("docker", "silent", "Start it."), problem("disk", "full", "Free some.")]
    assert report.lines(findings) == [
        "ok       python  3.11",
        "note     docker  silent",
        "                 -> Start it.",
        "PROBLEM  disk    full",
        "                 -> Free some.",
        "1 problem, 1 note",
    ]
    assert not report.well(findings)
    assert report.well(findings[:2])
    assert json.loads(report.as_json(findings))[2] == {
        "topic": "disk",
        "text": "full",
        "verdict": "PROBLEM",
        "do": "Free some.",
    }


def test_the_home_directory_is_not_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = [ok("a", "in /home/ann/x and /home/ann, not /home/anna"), note("b", "x", "cd /home/ann")]
    monkeypatch.setattr(report, "_all", lambda _: iter(told))
    environment = Environment(runs_dir=tmp_path, can_draw=False, home=Path("/home/ann"), shown={})
    assert [(f.text, f.do) for f in report.examine(environment)] == [
        ("in ~/x and ~, not /home/anna", ""),
        ("x", "cd ~"),
    ]


@pytest.mark.parametrize(
    ("findings", "code", "last"),
    [([ok("a", "b"), note("c", "d")], 0, "no problems, 1 note"), ([problem("a", "b", "c")], 1, "1 problem, no notes")],
)
def test_the_exit_code_tells_whether_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    findings: list[Finding],
    code: int,
    last: str,
) -> None:
    monkeypatch.setattr(report, "_all", lambda _: iter(findings))
    assert run(["doctor"]) == code
    assert capsys.readouterr().out.splitlines()[-1] == last
    assert run(["doctor", "--json"]) == code
    assert len(json.loads(capsys.readouterr().out)) == len(findings)


def test_it_imports_no_torch() -> None:
    code = (
        "import sys; from rollplex.cli.doctor import report; from rollplex.config.environment import read_environment;"
        "report.examine(read_environment());"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'sklearn')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
