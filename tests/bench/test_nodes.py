"""One row as a node: what is started, and how each end is told. The coordinator here is a stand-in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollplex.bench.nodes import Job, StoppedError, last_error, run_row, start_command
from rollplex.bench.rows import Mode, Row
from rollplex.bench.workload import Workload
from rollplex.cli.start import Prepared
from rollplex.config import load
from rollplex.errors import ConfigError, DataError, RollplexError

RunIt = Callable[[str], Row]


@pytest.fixture
def job(workload: Workload, tmp_path: Path) -> Job:
    return Job(
        mode=Mode(schedule="stream", prefix="replicated"),
        repeat=1,
        config=workload.config,
        overrides=["run.seed=5", "checkpoint.every=1", 'eval=[{"name": "x", "data": "rows.jsonl"}]'],
        iterations=2,
        warmup=1,
        prompt_tokens=36.0,
        run_dir=tmp_path / "r",
        log=tmp_path / "logs/row.log",
    )


@pytest.fixture
def run_it(job: Job) -> RunIt:
    """Run the row with a coordinator that carries out a Python text; `run_dir` is a path in it."""

    def run(text: str) -> Row:
        def command(prepared: Prepared, iterations: int) -> list[str]:
            assert iterations == 2
            begin = f"import sys; from pathlib import Path; run_dir = Path({str(prepared.run_dir)!r})\n"
            return [sys.executable, "-c", begin + text]

        return run_row(job, command=command)

    return run


def test_a_row_is_the_users_run_in_its_mode_without_evaluations_and_checkpoints(job: Job, run_it: RunIt) -> None:
    with pytest.raises(RollplexError):
        run_it("sys.exit(1)")
    config = load(job.run_dir / "config.yaml")
    assert (config.run.schedule, config.run.share_prefix, config.run.seed) == ("stream", False, 5)
    assert (config.eval, config.checkpoint.every, config.checkpoint.at_end) == ((), 0, False)
    prepared = Prepared(config=config, config_file=job.run_dir / "config.yaml", run_dir=job.run_dir)
    command = start_command(prepared, 2)
    assert command[1:4] == ["-P", "-m", "rollplex_coordinator"]
    assert command[command.index("--iterations") + 1] == "2"
    assert "--die-with-parent" in command


def test_a_row_that_fails_tells_the_coordinators_error_and_where_its_log_is(job: Job, run_it: RunIt) -> None:
    with pytest.raises(
        RollplexError, match=r"stream replicated, repeat 2; got WaitError in phase LOAD: too late"
    ) as caught:
        run_it(
            "print('data train: 8 rows'); sys.stderr.write('error: WaitError in phase LOAD: too late\\n'); sys.exit(1)"
        )
    assert type(caught.value) is RollplexError
    assert caught.value.where == str(job.log)
    assert "data train" in job.log.read_text()


def test_a_configuration_that_cannot_run_is_a_configuration_error(run_it: RunIt) -> None:
    with pytest.raises(ConfigError, match="got it does not fit"):
        run_it("sys.stderr.write('error: it does not fit\\n'); sys.exit(2)")


@pytest.mark.parametrize(("text", "code"), [("sys.exit(130)", 130), ("sys.exit(0)", 0)])
def test_a_row_that_was_stopped_is_no_failure_and_keeps_its_exit_code(run_it: RunIt, text: str, code: int) -> None:
    with pytest.raises(StoppedError) as caught:
        run_it(text)
    assert caught.value.exit_code == code


def test_the_records_of_a_row_stay(job: Job, run_it: RunIt) -> None:
    lines = '{"step": 0, "updated": 1.0}\\n{"step": 1, "updated": 0.0}\\n'
    with pytest.raises(DataError, match="made no update"):
        run_it(f"(run_dir / 'metrics.jsonl').write_text('{lines}')")
    assert (job.run_dir / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("error: one\n", "one"),
        ("12:00 data\nerror: one\n  log: x\nerror: two\n  log: y\n", "two\n  log: y"),
        ("12:00 data\nTraceback\nKeyError: 'x'\n", "KeyError: 'x'"),
        ("", "no word"),
    ],
)
def test_the_last_error_of_a_log_is_told_whole(tmp_path: Path, log: str, told: str) -> None:
    (tmp_path / "log").write_text(log)
    assert last_error(tmp_path / "log") == told
