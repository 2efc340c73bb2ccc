"""Carries out `rollplex conformance`: a process of its own computes, because it needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollplex.cli.child import run_child
from rollplex.config.environment import child_environment
from rollplex.errors import ConfigError
from rollplex.programs import own

GRACE_S = 5.0


def run_conformance(
    role: str, command: Sequence[str], *, json_file: Path | None, cases: Sequence[str], stop: bool
) -> int:
    """Test a program and show the report; the exit code: 0 it conforms, 1 it does not, 2 it could not be tested.

    Raises:
        ConfigError: a report that could not be written.
    """
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError("The folder of the report is not there", got=str(json_file), where="--json")
    options = [] if json_file is None else ["--json", str(json_file)]
    options += [part for case in cases for part in ("--case", case)] + ["--stop"] * stop
    words = own("rollplex.conformance", *options, role, "--", *command)
    return run_child(words, grace_s=GRACE_S, environment=child_environment(threads=1))
