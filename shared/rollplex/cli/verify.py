"""`rollplex verify`: runs a coordinator that computes one group in several ways, and says what it found. Knows the
verification only by the report that it leaves."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from rollplex.cli.child import run_child
from rollplex.cli.start import Prepared, coordinator_command, fresh, prepare, timestamp
from rollplex.config import load
from rollplex.config.config import Config
from rollplex.config.environment import child_environment
from rollplex.errors import ConfigError, RollplexError
from rollplex.verify.report import lines, read, write

REPORT_FILE = "verify.json"
"""In the run directory."""
EXIT_FAILED = 1


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to verify, beside the configuration.

    row: of the training data; None takes the first good one. json_file: where the report goes too. Tolerances: None
    takes those of the dtype. keep: leave the run directory even if all is well.
    """

    row: int | None = None
    json_file: Path | None = None
    logprob_tolerance: float | None = None
    gradient_tolerance: float | None = None
    keep: bool = False


def verify_command(prepared: Prepared, wanted: Wanted) -> list[str]:
    """The coordinator's command line for a verification."""
    command = [*coordinator_command(prepared, die_with_parent=True), "--verify", str(prepared.run_dir / REPORT_FILE)]
    options = {
        "--verify-row": wanted.row,
        "--verify-logprob-tolerance": wanted.logprob_tolerance,
        "--verify-gradient-tolerance": wanted.gradient_tolerance,
    }
    for name, value in options.items():
        if value is not None:
            command += [name, str(value)]
    return command


def require_host(config: Config) -> None:
    """A verification reads gradients where it can see them.

    Raises:
        ConfigError: the workers compute on a GPU.
    """
    if config.device.kind != "host":
        raise ConfigError(
            "A verification compares gradients in host memory",
            got=f"device.kind: {config.device.kind}",
            needed="host",
            do="Add --set device.kind=host --set rollout.engine=transformers; on a GPU compare schedules with "
            "`rollplex bench gradients`.",
            where="device.kind",
        )


def run_verify(
    config_file: Path,
    overrides: Sequence[str],
    wanted: Wanted,
    *,
    runs_dir: Path,
    say: Callable[[str], None],
    command: Callable[[Prepared, Wanted], list[str]] = verify_command,
) -> int:
    """Verify one group of the configuration's data in a new directory in `runs_dir`, and say the report; the exit code.

    The directory is removed if all is well and `wanted` does not keep it; else its path is said.

    Args:
        say: gets each line of output.
        command: how the coordinator is started.

    Raises:
        ConfigError: a configuration that cannot run, or a report that could not be written.
        RollplexError: the coordinator cannot be started, was killed, or ended without a report.
        OSError: a file or folder cannot be written.
    """
    if wanted.json_file is not None and not wanted.json_file.absolute().parent.is_dir():
        raise ConfigError("The folder of the report is not there", got=str(wanted.json_file), where="--json")
    require_host(load(config_file, overrides))
    run_dir = fresh(runs_dir, f"verify-{timestamp()}")
    prepared = prepare(config_file, overrides, run_dir, runs_dir, latest=False)
    config = prepared.config
    code = run_child(
        command(prepared, wanted),
        grace_s=2.0 * config.deadlines.leave_s + 5.0,
        environment=child_environment(threads=config.run.threads),
    )
    passed = _tell(prepared.run_dir / REPORT_FILE, config_file, wanted, code, say)
    if code == 0 and passed and not wanted.keep:
        shutil.rmtree(prepared.run_dir)
    else:
        say(f"run directory  {prepared.run_dir}")
    return code if code != 0 or passed else EXIT_FAILED


def _tell(file: Path, config_file: Path, wanted: Wanted, code: int, say: Callable[[str], None]) -> bool:
    """Say the report and hand it on; whether it says that all is well. Without one the coordinator has said why."""
    if not file.is_file():
        if code == 0:  # a stop from outside is no failure of the coordinator, but nothing was verified
            raise RollplexError("The verification was stopped before it was done", where=str(file.parent))
        return False
    report = replace(read(file), config=str(config_file))
    if wanted.json_file is not None:
        write(report, wanted.json_file)
    for line in lines(report):
        say(line)
    return report.passed
