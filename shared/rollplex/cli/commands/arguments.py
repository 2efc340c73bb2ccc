"""Arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_WHICH = "Run directory, or its name in the runs folder. Default: the run that is going on, else the newest."

RunArgument = Annotated[Path | None, typer.Argument(metavar="RUN", help=_WHICH)]
RunOption = Annotated[Path | None, typer.Option("--run", metavar="RUN", help=_WHICH)]
