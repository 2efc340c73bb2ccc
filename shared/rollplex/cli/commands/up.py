"""`rollplex up`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollplex.cli.commands.arguments import Overrides
from rollplex.config.environment import read_environment
from rollplex.journal.phases import MOST_ITERATIONS


def up(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="YAML file of the run. Default for a resumed run: its own.")
    ] = None,
    *,
    iterations: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_ITERATIONS,
            metavar="N",
            help="Stop after N in all. Default: run.iterations; when serving, none.",
        ),
    ] = None,
    set_: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the run leaves its files. Default: a new folder in runs.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Stay up and wait for the control API (POST /iterations).")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Go on from the newest good checkpoint of RUN, or from that checkpoint."),
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="A key that may differ in a resumed run. May be repeated."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check configuration, data, rewards and memory without a model, and end."),
    ] = False,
) -> None:
    """Start a node and run iterations.

    Those of CONFIG, from the beginning; or, with --resume, those that a run which has ended still lacks.
    """
    if resume is not None and dry_run:
        raise typer.BadParameter("--dry-run checks a run from its beginning: it does not go with --resume")
    if resume is not None:
        from rollplex.cli.resume import go_on  # noqa: PLC0415 - help stays quick

        go_on(resume, config, set_ or [], accepted=accept or [], iterations=iterations, serve=serve)
    if config is None:
        raise typer.BadParameter("missing; give one, or --resume RUN", param_hint="CONFIG")
    if dry_run:
        from rollplex.cli import dry_run as dry  # noqa: PLC0415 - help stays quick
        from rollplex.cli.output import say  # noqa: PLC0415

        raise typer.Exit(dry.dry_run(config, set_ or [], run_dir, iterations=iterations, serve=serve, say=say))
    from rollplex.cli.start import become, coordinator_command, prepare  # noqa: PLC0415 - help stays quick

    prepared = prepare(config, set_ or [], run_dir, read_environment().runs_dir)
    become(coordinator_command(prepared, iterations=iterations, serve=serve))
