"""`rollplex tune share`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollplex.cli.commands.arguments import Overrides, command_line
from rollplex.config.environment import read_environment

tune = typer.Typer(name="tune", help="Measure settings and write them down.", no_args_is_help=True)


@tune.callback()
def _group() -> None:
    """Measure settings and write them down."""


@tune.command()
def share(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")],
    *,
    candidates: Annotated[
        str,
        typer.Option(metavar="LIST", help="turns, or shares such as 0.64:0.36 (prefix work : decoding), with commas."),
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, max=100, metavar="N", help="How often each is measured.")] = 2,
    iterations: Annotated[int, typer.Option(min=2, metavar="N", help="Iterations of each row.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, metavar="N", help="So many first ones of each do not count.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where rows are kept; one with rows is gone on with. Default: new, in runs."),
    ] = None,
    set_: Overrides = None,
    only: Annotated[int, typer.Option(min=0, metavar="N", help="At most so many rows now; the next call goes on.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the result; leave CONFIG as it is.")] = False,
) -> None:
    """Divide the GPU between prefix work and decoding.

    Runs CONFIG for a few iterations with each division, and writes the best one into CONFIG: device.prefix_share and
    device.decode_share. The smallest limit that is as good as the best is taken.
    """
    from rollplex.cli.tune import run_tune_share  # noqa: PLC0415 - help stays quick

    code = run_tune_share(
        config,
        overrides=set_ or [],
        candidates=candidates,
        repeats=repeats,
        iterations=iterations,
        warmup=warmup,
        out=out,
        runs_dir=read_environment().runs_dir,
        only=only,
        dry_run=dry_run,
        command=command_line(),
    )
    raise typer.Exit(code)
