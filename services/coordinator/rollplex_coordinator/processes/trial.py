"""The conformance test of a newcomer, as a process beside the run, which goes on meanwhile.

Owns its start, its end and its report. It starts processes of its own, in run directories of their own.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollplex.conformance.report import Report, first_failure, from_json
from rollplex.programs import own
from rollplex.protocol.common import Role
from rollplex_coordinator.processes.environment import environment_of

END_S = 5.0
PATIENCE = ("--received-s", "15", "--grace-s", "15")
"""More than a test by itself has: the run beside it takes the cores."""
NAME = "conformance"
UNTESTED = "conformance"
"""The case of a test that did not end with a report."""

log = logging.getLogger("rollplex.coordinator")


class Trial:
    """One test. `pidfd` becomes readable when it is over.

    Args:
        run_dir: gets its log and its report.
    """

    def __init__(self, run_dir: Path, role: Role, command: Sequence[str]) -> None:
        self._report = run_dir / f"{NAME}.json"
        self._report.unlink(missing_ok=True)
        self.log_path = run_dir / "logs" / f"{NAME}.log"
        self.log_path.parent.mkdir(exist_ok=True)
        words = own("rollplex.conformance", "--stop", "--json", str(self._report), *PATIENCE, role, "--")
        with self.log_path.open("ab") as output:
            self._process = subprocess.Popen(
                [*words, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment_of(role, os.environ, 1, None),
            )
        self.pidfd = os.pidfd_open(self._process.pid)

    def failure(self) -> tuple[str, str, str] | None:
        """After its end: the case that failed, what was got and what was needed; None: it conforms."""
        code = self._process.wait(END_S)
        report = self._read()
        if report is None or report.passed != (code == 0):
            return (
                UNTESTED,
                f"exit code {code} and {'no' if report is None else 'another'} report",
                f"a test that ends; its log is {self.log_path}",
            )
        failed = first_failure(report.verdicts)
        if failed is not None:
            return failed.case, failed.got, failed.needed
        unreached = next((verdict for verdict in report.verdicts if not verdict.passed), None)
        return None if unreached is None else (unreached.case, unreached.got, "to be reached")

    def close(self) -> None:
        """End it, if it runs: by SIGTERM, so that it ends what it started."""
        if self._process.poll() is None:
            self._process.terminate()
            select.select([self.pidfd], [], [], END_S)
        if self._process.poll() is None:
            self._process.kill()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            log.error("the conformance test (pid %d) was killed, but has not ended", self._process.pid)
        os.close(self.pidfd)

    def _read(self) -> Report | None:
        try:
            return from_json(self._report.read_bytes())
        except (OSError, msgspec.MsgspecError):
            return None
