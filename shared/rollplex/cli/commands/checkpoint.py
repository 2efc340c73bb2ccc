"""`rollplex checkpoint list` and `rollplex checkpoint verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollplex.config.environment import read_environment

checkpoint = typer.Typer(name="checkpoint", help="Look at the checkpoints of a run.", no_args_is_help=True)

RunOption = Annotated[
    Path | None, typer.Argument(metavar="[RUN]", help="Run directory, or its name. Default: the newest run.")
]


@checkpoint.command("list")
def list_(run: RunOption = None) -> None:
    """What checkpoints a run has, oldest first. Files are not read: see verify."""
    from rollplex.cli.checkpoints import listing  # noqa: PLC0415 - help stays quick
    from rollplex.cli.output import say  # noqa: PLC0415
    from rollplex.cli.target import find_run  # noqa: PLC0415

    for line in listing(find_run(run, read_environment().runs_dir)):
        say(line)


@checkpoint.command()
def verify(
    place: Annotated[
        Path | None,
        typer.Argument(metavar="[PLACE]", help="A checkpoint folder, or a run: all of its. Default: the newest run."),
    ] = None,
) -> None:
    """Compare every file with its manifest. Exit code 1 if a checkpoint is not what it was when it was written."""
    from rollplex.cli.checkpoints import chosen, verified  # noqa: PLC0415 - help stays quick
    from rollplex.cli.output import say  # noqa: PLC0415

    if not verified(chosen(place, read_environment().runs_dir), say):
        raise typer.Exit(1)
