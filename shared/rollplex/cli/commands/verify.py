"""`rollplex verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollplex.cli.commands.arguments import Overrides
from rollplex.config.environment import read_environment


def verify(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")],
    *,
    set_: Overrides = None,
    row: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Row of the data, from 0. Default: the first good one.")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report there too, as JSON.")] = None,
    logprob_tolerance: Annotated[
        float | None, typer.Option(min=0.0, metavar="X", help="Absolute. Default: by model.dtype.")
    ] = None,
    gradient_tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="X", help="Relative to a parameter's largest. Default: by model.dtype."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the run directory even if all is well.")] = False,
) -> None:
    """Check on your data that fast equals slow.

    Computes one group split and unsplit, and compares log-probabilities and every gradient.

    Samples real responses, then trains them three ways without changing a weight: prefix shared, prefix per response,
    and whole sequences through plain transformers. Exit code 1 if they lie further apart than the tolerances.
    """
    from rollplex.cli.output import say  # noqa: PLC0415 - help stays quick
    from rollplex.cli.verify import Wanted, run_verify  # noqa: PLC0415

    wanted = Wanted(
        row=row,
        json_file=json,
        logprob_tolerance=logprob_tolerance,
        gradient_tolerance=gradient_tolerance,
        keep=keep,
    )
    raise typer.Exit(run_verify(config, set_ or [], wanted, runs_dir=read_environment().runs_dir, say=say))
