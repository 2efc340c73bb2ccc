"""`rollplex history`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollplex.config.environment import read_environment
from rollplex.programs import own


def history(
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="In which runs lie. Default: the runs folder.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65_535, metavar="N", help="Default: any free one.")] = 0,
) -> None:
    """Show past runs in a browser.

    Numbers side by side, timelines, and samples with pictures. Reads only; loopback only. While a run goes on, its own
    dashboard shows the same.
    """

    from rollplex.cli.start import become  # noqa: PLC0415

    runs_dir = read_environment().runs_dir if folder is None else folder
    become(own("rollplex_coordinator.archive", str(runs_dir), "--port", str(port)))
