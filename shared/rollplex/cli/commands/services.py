"""`rollplex services`."""

from __future__ import annotations

from typing import Annotated

import typer

from rollplex.cli.commands.arguments import RunArgument
from rollplex.config.environment import read_environment


def services(
    run: RunArgument = None,
    json: Annotated[bool, typer.Option("--json", help="As one JSON array, for programs.")] = False,
) -> None:
    """List the service processes of a live run: state, device, incarnation, since when, and their programs."""
    from rollplex.cli.output import say  # noqa: PLC0415 - help stays quick
    from rollplex.cli.services import as_json, table  # noqa: PLC0415
    from rollplex.cli.target import find_run  # noqa: PLC0415

    run_dir = find_run(run, read_environment().runs_dir)
    say(as_json(run_dir) if json else table(run_dir))
