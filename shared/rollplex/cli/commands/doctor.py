"""`rollplex doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from rollplex.config.environment import read_environment


def doctor(json: Annotated[bool, typer.Option("--json", help="As a JSON list, for programs.")] = False) -> None:
    """Check whether this machine can run Rollplex.

    Versions, memory, limits, the runs folder, GPUs, containers: one report to pass on, without secrets. Exit code 1 if
    there is a problem.
    """
    from rollplex.cli.doctor import report  # noqa: PLC0415 - help stays quick
    from rollplex.cli.output import say  # noqa: PLC0415

    findings = report.examine(read_environment())
    for line in [report.as_json(findings)] if json else report.lines(findings):
        say(line)
    if not report.well(findings):
        raise typer.Exit(1)
