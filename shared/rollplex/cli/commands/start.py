"""`rollplex start`."""

from __future__ import annotations

from typing import Annotated

import typer

from rollplex.cli.commands.arguments import RunOption
from rollplex.config.environment import read_environment


def start(
    count: Annotated[int, typer.Argument(metavar="N", min=1, max=1_000_000_000, help="How many more iterations.")],
    run: RunOption = None,
) -> None:
    """Have a live run do N more iterations."""
    from rollplex.cli.api import connect  # noqa: PLC0415 - help stays quick
    from rollplex.cli.output import say  # noqa: PLC0415
    from rollplex.cli.target import find_run  # noqa: PLC0415

    with connect(find_run(run, read_environment().runs_dir)) as api:
        status = api.start(count)
    say(f"{status.run}: {count} more; {status.iterations_done} iterations done of {status.iterations_wanted} wanted")
