"""`rollplex logs`."""

from __future__ import annotations

from typing import Annotated

import typer

from rollplex.cli.commands.arguments import RunOption
from rollplex.config.environment import read_environment


def logs(
    service: Annotated[
        str | None, typer.Argument(metavar="SERVICE", help="rollout, prefix, trainer, input or reward. Default: all.")
    ] = None,
    run: RunOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come, until the run ends.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, metavar="N", help="How many of the last lines.")] = 100,
) -> None:
    """Show what the services of a run wrote.

    Errors with their tracebacks, and what reward functions print.
    """
    from rollplex.cli.logs import show  # noqa: PLC0415 - help stays quick
    from rollplex.cli.output import say  # noqa: PLC0415
    from rollplex.cli.target import find_run  # noqa: PLC0415

    show(find_run(run, read_environment().runs_dir), service, lines=lines, follow=follow, say=say)
