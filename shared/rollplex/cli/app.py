"""The commands and their arguments, and the outer loop: an error is one line on the standard error, never a traceback.

Exit codes: 0 done or stopped by SIGTERM, SIGHUP or HTTP; 1 the run failed; 2 the configuration or the command line is
wrong; 130 interrupted.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from rollplex.cli.commands.bench import bench
from rollplex.cli.commands.checkpoint import checkpoint
from rollplex.cli.commands.config import config
from rollplex.cli.commands.conformance import SETTINGS, conformance
from rollplex.cli.commands.data import data
from rollplex.cli.commands.demo import demo
from rollplex.cli.commands.doctor import doctor
from rollplex.cli.commands.down import down
from rollplex.cli.commands.history import history
from rollplex.cli.commands.logs import logs
from rollplex.cli.commands.plan import plan
from rollplex.cli.commands.rewards import rewards
from rollplex.cli.commands.runs import runs
from rollplex.cli.commands.services import services
from rollplex.cli.commands.start import start
from rollplex.cli.commands.status import status
from rollplex.cli.commands.stop import stop
from rollplex.cli.commands.swap import SETTINGS as SWAP_SETTINGS
from rollplex.cli.commands.swap import swap
from rollplex.cli.commands.trace import trace
from rollplex.cli.commands.tune import tune
from rollplex.cli.commands.up import up
from rollplex.cli.commands.verify import verify
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


for command in (demo, up, status, start, stop, down, logs, runs, history, doctor, plan, trace, verify):
    app.command()(command)
app.command()(services)
app.command(context_settings=SWAP_SETTINGS)(swap)
app.command(context_settings=SETTINGS)(conformance)
app.add_typer(config)
app.add_typer(checkpoint)
app.add_typer(bench)
app.add_typer(tune)
app.add_typer(data)
app.add_typer(rewards)


def run(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command line (default: this process's); the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files may be no text, or none that this terminal can show
            stream.reconfigure(errors="backslashreplace")
    try:
        app(args=None if arguments is None else list(arguments), prog_name="rollplex")
    except SystemExit as end:  # typer ends so, with usage errors too
        return end.code if isinstance(end.code, int) else EXIT_FAILED
    except ConfigError as error:
        return _error(error, EXIT_CONFIG)
    except (RollplexError, OSError) as error:
        return _error(error if _here() else _nowhere(), EXIT_FAILED)
    return 0


def _here() -> bool:
    """Whether the folder that this process was started in is there."""
    try:
        Path.cwd()
    except OSError:
        return False
    return True


def _nowhere() -> RollplexError:
    return ConfigError("The current folder is not there any more", do="cd to one that is, and try again.")


def _error(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code
