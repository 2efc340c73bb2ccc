"""`rollplex stop`."""

from __future__ import annotations

from typing import Annotated

import typer

from rollplex.cli.commands.arguments import RunOption
from rollplex.config.environment import read_environment


def stop(
    run: RunOption = None,
    now: Annotated[
        bool, typer.Option("--now", help="Give the present iteration up. What came after the last checkpoint is lost.")
    ] = False,
    stay: Annotated[bool, typer.Option("--stay", help="Keep the node up for `rollplex start`.")] = False,
    wait: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="How long to wait until it has happened; 0: do not.")
    ] = 600.0,
) -> None:
    """End a run after its present iteration.

    Its last evaluations are made and a checkpoint is written; waits until the process is gone.
    """
    from rollplex.cli import ending  # noqa: PLC0415 - help stays quick
    from rollplex.cli.output import say  # noqa: PLC0415
    from rollplex.cli.summary import summarize  # noqa: PLC0415
    from rollplex.cli.target import find_run  # noqa: PLC0415

    if now and stay:
        raise typer.BadParameter("--now and --stay exclude each other: a run cannot go on after a given-up iteration")
    runs_dir = read_environment().runs_dir
    run_dir = find_run(run, runs_dir)
    if stay:
        ending.stay(run_dir, wait_s=wait, say=say)
        return
    ending.stop(run_dir, now=now, wait_s=wait, say=say)
    if wait:
        found = summarize(run_dir, runs_dir)
        say(f"{found.state} after {found.iterations} iterations; newest checkpoint: {found.checkpoint or 'none'}")
