"""The conformance test that a coordinator starts: its verdict, and its end before it is over."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

import pytest

from rollplex.protocol.common import Role
from rollplex_coordinator.processes.trial import Trial


def over(trial: Trial, deadline_s: float = 100.0) -> bool:
    return bool(select.select([trial.pidfd], [], [], deadline_s)[0])


@pytest.mark.timeout(150)
def test_the_first_case_that_fails_is_the_verdict(tmp_path: Path) -> None:
    trial = Trial(tmp_path, Role.ROLLOUT, [sys.executable, "-c", "print('no service')"])
    assert over(trial)
    assert trial.failure() == ("hello", "exit code 0", "a hello on the stream")
    trial.close()
    assert "FAIL  hello" in trial.log_path.read_text()


@pytest.mark.timeout(150)
def test_a_program_that_cannot_be_started_is_a_failure_that_names_the_log(tmp_path: Path) -> None:
    trial = Trial(tmp_path, Role.PREFIX, ["/no/such/program"])
    assert over(trial)
    failure = trial.failure()
    assert failure is not None
    case, got, needed = failure
    assert (case, got) == ("conformance", "exit code 2 and no report")
    assert str(trial.log_path) in needed
    assert "The program cannot be started" in trial.log_path.read_text()
    trial.close()


@pytest.mark.timeout(150)
def test_a_test_that_is_ended_early_ends_what_it_has_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    text = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    trial = Trial(tmp_path, Role.ROLLOUT, [sys.executable, "-c", text])
    while not pid_file.exists() or not pid_file.read_text():
        assert not over(trial, 0.02), trial.log_path.read_text()
    pid = int(pid_file.read_text())
    trial.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
