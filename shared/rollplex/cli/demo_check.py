"""The demo's last step: a verification of the run's trained weights, quietly, in a directory beside the run's.

Knows the verification only by its exit code and the report that it leaves.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from rollplex.cli.child import run_child
from rollplex.cli.start import Prepared, fresh, prepare
from rollplex.cli.verify import REPORT_FILE, Wanted, verify_command
from rollplex.config.environment import child_environment
from rollplex.demo.exactness import exactness_lines, heading
from rollplex.demo.guide import newest_checkpoint
from rollplex.verify.report import Report, read

CHECK = "check"
"""Begins the name of the directory; as long as its path may be, it must hold sockets."""
LOG = "output.log"
VerifyCommand = Callable[[Prepared], list[str]]


def default_command(prepared: Prepared) -> list[str]:
    """How the coordinator of a verification is started."""
    return verify_command(prepared, Wanted())


def check_exactness(
    config: Path, run_dir: Path, *, say: Callable[[str], None], command: VerifyCommand = default_command
) -> tuple[int, Report | None]:
    """Verify the newest weights of a run and say what was found; the coordinator's exit code, and its report if any.

    The report stays in the run directory; the verification's own directory only if something went wrong.

    Args:
        config: the demo's configuration.
        run_dir: of the run, in the demo's folder.

    Raises:
        RollplexError: the coordinator cannot be started, or was killed.
        OSError: a file cannot be written.
    """
    for line in heading():
        say(line)
    weights = newest_checkpoint(run_dir)
    overrides = [] if weights is None else [f"model.path={json.dumps(str(weights))}"]
    prepared = prepare(config, overrides, fresh(run_dir.parent, CHECK), run_dir.parent, latest=False)
    settings, place = prepared.config, prepared.run_dir
    with (place / LOG).open("wb") as log:
        code = run_child(
            command(prepared),
            grace_s=2.0 * settings.deadlines.leave_s + 5.0,
            environment=child_environment(threads=settings.run.threads),
            output=log.fileno(),
        )
    report = read(place / REPORT_FILE) if (place / REPORT_FILE).is_file() else None
    if report is None:
        say(f"  it did not come to its end (exit code {code}); what it said: {place / LOG}")
        return code, None
    shutil.copyfile(place / REPORT_FILE, run_dir / REPORT_FILE)
    for line in exactness_lines(report):
        say(line)
    if code == 0 and report.passed:
        shutil.rmtree(place)
    else:
        say(f"  {'run directory':<26} {place}")
    return code, report
