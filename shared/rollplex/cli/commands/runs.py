"""`rollplex runs`."""

from __future__ import annotations

from typing import Annotated

import typer

from rollplex.config.environment import read_environment


def runs(json: Annotated[bool, typer.Option("--json", help="As a JSON list, for programs.")] = False) -> None:
    """List the runs, newest first."""
    from rollplex.cli.output import say  # noqa: PLC0415 - help stays quick
    from rollplex.cli.runs import as_json, table  # noqa: PLC0415

    runs_dir = read_environment().runs_dir
    say(as_json(runs_dir) if json else table(runs_dir))
