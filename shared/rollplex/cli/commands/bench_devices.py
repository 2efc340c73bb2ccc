"""`rollplex bench refresh` and `placements`: several devices."""

from __future__ import annotations

from typing import Annotated

import typer

from rollplex.cli.commands import bench_options as options
from rollplex.cli.commands.arguments import Overrides, command_line
from rollplex.config.environment import read_environment


def refresh(
    *,
    preset: Annotated[
        str, typer.Option(metavar="NAME", help="Sizes of the model: tiny-wide, qwen2.5-vl-3b, ...")
    ] = "qwen2.5-vl-3b",
    placements: options.Placements = "2x1/1x2,2x1/2x1,1x1+1x1",
    device: Annotated[str, typer.Option(metavar="host|cuda", help="Whose memory.")] = "host",
    gpu: Annotated[int, typer.Option(min=0, metavar="N", help="The first one, as nvidia-smi counts.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, max=10_000, metavar="N", help="Of each way to bring the pieces.")] = 20,
    warmup: Annotated[int, typer.Option(min=1, metavar="N", help="So many first ones of each do not count.")] = 3,
    out: options.NewFolder = None,
    markdown: options.Markdown = False,
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
        command=command_line(),
    )
    raise typer.Exit(code)


def placements(
    config: options.Workload,
    *,
    places: options.Placements = "2x1/1x2,1x1+1x1",
    modes: options.Modes = "serial,overlap,stream",
    repeats: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="How often each row is measured.")] = 3,
    iterations: Annotated[int, typer.Option(min=1, metavar="N", help="Iterations of each row.")] = 4,
    warmup: options.Warmup = 1,
    only: options.OnlyRows = 0,
    together: Annotated[
        bool,
        typer.Option("--together/--alone", help="A placement's schedules take turns in one node, or not."),
    ] = True,
    out: options.NewFolder = None,
    set_: Overrides = None,
    markdown: options.Markdown = False,
) -> None:
    """Compare placements on several devices.

    Runs CONFIG with the rollout on the devices that train, and on devices of its own: seconds of an iteration, and how
    long each device is idle. What is measured is kept row by row: the same command with the same --out goes on.
    """
    from rollplex.cli.bench_devices import bench_placements  # noqa: PLC0415 - help stays quick

    code = bench_placements(
        config,
        overrides=set_ or [],
        placements=places,
        modes=modes,
        repeats=repeats,
        iterations=iterations,
        warmup=warmup,
        limit=only,
        together=together,
        out=out,
        runs_dir=read_environment().runs_dir,
        markdown=markdown,
        command=command_line(),
    )
    raise typer.Exit(code)
