"""`rollplex demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollplex.config.environment import read_environment


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Four digits and 400 iterations instead of ten and 1800.")] = (
        False
    ),
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Where to write it; an earlier demo's runs there stay. Default: a new folder in runs.",
        ),
    ] = None,
) -> None:
    """Teach a tiny model to read digits.

    From scratch, on real scans; and check it on scans that it has not seen.
    """
    from rollplex.cli.demo import run_demo, screen_of_stdout  # noqa: PLC0415
    from rollplex.cli.output import say  # noqa: PLC0415 - help stays quick

    runs_dir = read_environment().runs_dir
    raise typer.Exit(run_demo(folder, quick=quick, runs_dir=runs_dir, say=say, screen=screen_of_stdout()))
