"""Options that several benches have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Workload = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the workload.")]
Placements = Annotated[
    str,
    typer.Option(
        "--placements",
        metavar="LIST",
        help="Training TP x replicas / rollout TP x engines, with commas; +: devices of their own.",
    ),
]
Modes = Annotated[str, typer.Option(metavar="LIST", help="Schedules, with commas.")]
Warmup = Annotated[int, typer.Option(min=0, metavar="N", help="So many first ones of each do not count.")]
OnlyRows = Annotated[int, typer.Option(min=0, metavar="N", help="At most so many rows now; the next call goes on.")]
NewFolder = Annotated[Path | None, typer.Option(metavar="DIR", help="The bench's folder. Default: new, in runs.")]
Folder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The folder; one begun is gone on with. Default: new, in runs.")
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the result in Markdown.")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Of a run that has ended, or goes on.")]
