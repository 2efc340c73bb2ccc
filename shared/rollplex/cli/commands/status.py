"""`rollplex status`."""

from __future__ import annotations

from typing import Annotated

import typer

from rollplex.cli.commands.arguments import RunArgument
from rollplex.config.environment import read_environment


def status(
    run: RunArgument = None,
    json: Annotated[bool, typer.Option("--json", help="As one JSON object, for programs.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Stay and show how the run goes on, until it ends.")] = False,
) -> None:
    """Say where a run stands, or how it ended.

    Phase, iterations, what is waited for, from whom, since when and until when, memory, services.
    """
    from rollplex.cli.output import say  # noqa: PLC0415 - help stays quick
    from rollplex.cli.status import as_json, lines, report  # noqa: PLC0415
    from rollplex.cli.status import watch as follow  # noqa: PLC0415
    from rollplex.cli.target import find_run  # noqa: PLC0415

    if json and watch:
        raise typer.BadParameter("--json and --watch exclude each other")
    runs_dir = read_environment().runs_dir
    run_dir = find_run(run, runs_dir)
    if watch:
        raise typer.Exit(follow(run_dir, runs_dir, say=say))
    found = report(run_dir, runs_dir)
    for line in [as_json(found)] if json else lines(found):
        say(line)
