"""Arguments that several commands have, and the command as it was given."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

_WHICH = "Run directory, or its name in the runs folder. Default: the run that is going on, else the newest."

RunArgument = Annotated[Path | None, typer.Argument(metavar="RUN", help=_WHICH)]
RunOption = Annotated[Path | None, typer.Option("--run", metavar="RUN", help=_WHICH)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=V", help="Override a key of CONFIG. May be repeated.")
]


def command_line() -> str:
    """This command, as results quote it."""
    return shlex.join(["rollplex", *sys.argv[1:]])
