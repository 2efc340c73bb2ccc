"""`rollplex bench refresh` and `placements`: several devices."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from rollplex.config.environment import read_environment

Out = Annotated[Path | None, typer.Option(metavar="DIR", help="The bench's folder. Default: new, in runs.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the result in Markdown.")]


def refresh(
    *,
    preset: Annotated[
        str, typer.Option(metavar="NAME", help="Sizes of the model: tiny-wide, qwen2.5-vl-3b, ...")
    ] = "qwen2.5-vl-3b",
    placements: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="Training TP x replicas / rollout TP x engines, with commas; +: devices of their own."
        ),
    ] = "2x1/1x2,2x1/2x1,1x1+1x1",
    device: Annotated[str, typer.Option(metavar="host|cuda", help="Whose memory.")] = "host",
    gpu: Annotated[int, typer.Option(min=0, metavar="N", help="The first one, as nvidia-smi counts.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, max=10_000, metavar="N", help="Of each way to bring the pieces.")] = 20,
    warmup: Annotated[int, typer.Option(min=1, metavar="N", help="So many first ones of each do not count.")] = 3,
    out: Out = None,
    markdown: Markdown = False,
) -> None:
    """Time the copies after an update.

    Into mapped segments of peers, as a run's trainers make them, beside collectives that bring the same pieces. Exit
    code 1 if the two leave different bytes.
    """
    from rollplex.cli.bench_devices import bench_refresh  # noqa: PLC0415 - help stays quick

    code = bench_refresh(
        preset=preset,
        placements=placements,
        device=device,
        gpu=gpu,
        repeats=repeats,
        warmup=warmup,
        out=out,
        runs_dir=read_environment().runs_dir,
        markdown=markdown,
        command=shlex.join(["rollplex", *sys.argv[1:]]),
    )
    raise typer.Exit(code)
