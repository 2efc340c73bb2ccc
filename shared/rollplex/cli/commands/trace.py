"""`rollplex trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollplex.cli.commands.arguments import RunArgument
from rollplex.config.environment import read_environment


def trace(
    run: RunArgument = None,
    steps: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Only iterations A up to but not including B; A:, :B and A also work."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the trace. Default: in the run directory.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the iterations (without --steps: two typical ones).")
    ] = None,
) -> None:
    """Say where the time of a run went.

    And write a trace of it, which ui.perfetto.dev opens; a picture too, if wanted.
    """
    from rollplex.cli.output import say  # noqa: PLC0415 - help stays quick
    from rollplex.cli.target import find_run  # noqa: PLC0415
    from rollplex.trace.run import write_trace  # noqa: PLC0415

    write_trace(find_run(run, read_environment().runs_dir), steps=steps, output=output, svg=svg, say=say)
