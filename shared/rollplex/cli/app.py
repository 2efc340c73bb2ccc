"""The commands and their arguments, and the outer loop: an error is one line on the standard error, never a traceback.

Exit codes: 0 done or stopped by SIGTERM or HTTP; 1 the run failed; 2 the configuration or the command line is wrong;
130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rollplex.config.environment import read_environment
from rollplex.errors import ConfigError, RollplexError

EXIT_FAILED = 1
EXIT_CONFIG = 2

app = typer.Typer(
    name="rollplex",
    help="Post-train vision-language models by reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def up(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")],
    iterations: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Stop after N iterations. Default: run.iterations; when serving, none."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=V", help="Override a key of CONFIG. May be repeated.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the run leaves its files. Default: a new folder in runs.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Stay up and wait for the control API (POST /iterations).")
    ] = False,
) -> None:
    """Start a node and run the iterations of CONFIG."""
    from rollplex.cli.start import become, coordinator_command, prepare  # noqa: PLC0415 - help stays quick

    prepared = prepare(config, set_ or [], run_dir, read_environment().runs_dir)
    become(coordinator_command(prepared, iterations=iterations, serve=serve))


@app.command()
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Four digits and 400 iterations instead of ten and 1800.")] = (
        False
    ),
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Where to write it. Default: a new folder in runs.")
    ] = None,
) -> None:
    """Teach a tiny model to name handwritten digits, from scratch, and check it on scans it has not seen."""
    from rollplex.cli.demo import run_demo  # noqa: PLC0415 - help stays quick

    raise typer.Exit(run_demo(folder, quick=quick, runs_dir=read_environment().runs_dir, say=_say))


def run(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command line (default: this process's); the exit code."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="rollplex")
    except SystemExit as end:  # typer ends so, with usage errors too
        return end.code if isinstance(end.code, int) else EXIT_FAILED
    except ConfigError as error:
        return _error(error, EXIT_CONFIG)
    except (RollplexError, OSError) as error:
        return _error(error, EXIT_FAILED)
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _error(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code
