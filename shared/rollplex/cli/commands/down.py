"""`rollplex down`."""

from __future__ import annotations

from typing import Annotated

import typer

from rollplex.cli.commands.arguments import RunOption
from rollplex.config.environment import read_environment
from rollplex.errors import RollplexError


def down(
    run: RunOption = None,
    all_: Annotated[bool, typer.Option("--all", help="Every run of the runs folder that is going on.")] = False,
    grace: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="For an orderly end, before signals are used.")
    ] = 30.0,
) -> None:
    """End a run now, whatever state it is in.

    Nothing is saved that is not saved yet. First by the control API, then by signals. Exit code 0 also if nothing was
    running.
    """
    from rollplex.cli import ending  # noqa: PLC0415 - help stays quick
    from rollplex.cli.output import say  # noqa: PLC0415
    from rollplex.cli.target import find_run, live_runs  # noqa: PLC0415

    if all_ and run is not None:
        raise typer.BadParameter("--all and --run exclude each other")
    runs_dir = read_environment().runs_dir
    chosen = live_runs(runs_dir) if all_ or run is None else [find_run(run, runs_dir)]
    if not chosen:
        say(f"{runs_dir}: nothing is running")
    elif len(chosen) > 1 and not all_:
        find_run(None, runs_dir)  # says which there are
    failed = False
    for run_dir in chosen:
        try:
            ending.down(run_dir, grace_s=grace, say=say)
        except RollplexError as error:
            if not all_:
                raise
            failed = True
            say(f"error: {error}")
    if failed:
        raise typer.Exit(1)
