"""`rollplex bench`: schedules, workload, gradients, parallel, refresh, placements, gap, hbm, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollplex.cli.commands import bench_devices
from rollplex.cli.commands import bench_options as options
from rollplex.cli.commands.arguments import Overrides, command_line
from rollplex.config.environment import read_environment

bench = typer.Typer(name="bench", help="Measure speed and memory.", no_args_is_help=True)


@bench.command()
def schedules(
    config: options.Workload,
    *,
    repeats: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="How often each mode is run.")] = 3,
    iterations: Annotated[int, typer.Option(min=1, metavar="N", help="Iterations of each run.")] = 4,
    warmup: options.Warmup = 1,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The bench's folder; one with rows is gone on with. Default: new, in runs."),
    ] = None,
    set_: Overrides = None,
    modes: options.Modes = "serial,overlap,stream",
    prefixes: Annotated[str, typer.Option(metavar="LIST", help="Kinds of prefix, with commas.")] = "shared,replicated",
    rows: Annotated[
        str,
        typer.Option(metavar="LIST", help="In their place: rows such as serial:shared,overlap:shared,practised."),
    ] = "",
    only: options.OnlyRows = 0,
    prompts: Annotated[
        int, typer.Option(min=0, metavar="N", help="Prompts of rows with replicated prefixes; 0: as CONFIG has.")
    ] = 0,
    together: Annotated[
        bool, typer.Option("--together", help="Rows of one kind of prefix take turns in one node: one start for all.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the result: *.svg or *.png.")] = None,
    markdown: options.Markdown = False,
) -> None:
    """Say what sharing and overlap gain.

    Runs CONFIG under every schedule, with shared and with replicated prefixes.

    What is measured is kept row by row: the same command with the same --out goes on where it ended.
    """
    from rollplex.cli.bench import bench_schedules  # noqa: PLC0415 - help stays quick

    code = bench_schedules(
        config,
        overrides=set_ or [],
        modes=modes,
        prefixes=prefixes,
        repeats=repeats,
        iterations=iterations,
        warmup=warmup,
        out=out,
        runs_dir=read_environment().runs_dir,
        plot=plot,
        markdown=markdown,
        command=command_line(),
        rows=rows,
        limit=only,
        replicated_prompts=prompts,
        together=together,
    )
    raise typer.Exit(code)


@bench.command()
def workload(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write it; made if it is not there.")],
    *,
    vision_tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="Of each prompt's pictures. Default: 576, or of --prompt-tokens.")
    ] = 0,
    text_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Of each prompt's question.")] = 16,
    prompt_tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="Of each prompt in all: the question fills up.")
    ] = 0,
    mixed: Annotated[bool, typer.Option("--mixed", help="Several sizes of pictures; in some rows several.")] = False,
    video: Annotated[int, typer.Option(min=0, metavar="FRAMES", help="A video in each row, not a picture.")] = 0,
    response: Annotated[
        str,
        typer.Option(metavar="R", help="Tokens of a response: 32, from 16:48, or tail:512:2048 (mean and longest)."),
    ] = "32",
    group_size: Annotated[int, typer.Option(min=2, metavar="N", help="Responses of each prompt.")] = 8,
    prompts: Annotated[int, typer.Option(min=1, metavar="N", help="Prompts of each iteration.")] = 2,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Iterations with rows of their own.")] = 4,
    preset: Annotated[
        str, typer.Option(metavar="NAME", help="The model: small, tiny, tiny-wide, tiny-gpu, qwen2.5-vl-3b.")
    ] = "small",
    device: Annotated[str, typer.Option(metavar="host|cuda", help="What it is to run on.")] = "host",
    placement: Annotated[
        str, typer.Option(metavar="P", help="On several devices: 2x1/1x2, or 1x1+1x1. Default: one.")
    ] = "",
) -> None:
    """Write a workload for it; run nothing.

    A model, real pictures, and a configuration, with exactly known token counts.
    """
    from rollplex.cli.bench import bench_workload  # noqa: PLC0415 - help stays quick

    bench_workload(
        folder,
        response=response,
        device=device,
        placement=placement,
        vision_tokens=vision_tokens,
        text_tokens=text_tokens,
        prompt_tokens=prompt_tokens,
        mixed=mixed,
        video_frames=video,
        group_size=group_size,
        prompts=prompts,
        steps=steps,
        preset=preset,
    )


@bench.command()
def gradients(
    config: options.Workload,
    *,
    responses: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="completions.jsonl with tokens (run.log_tokens). Default: record some."),
    ] = None,
    spread: Annotated[
        float, typer.Option(min=0.0, metavar="S", help="Seconds over which the responses' ends are spread.")
    ] = 2.0,
    only: Annotated[int, typer.Option(min=0, metavar="N", help="At most so many runs; the next call goes on.")] = 0,
    out: options.Folder = None,
    set_: Overrides = None,
) -> None:
    """Compare the schedules' gradients.

    Replays the same responses under serial, serial again, overlap and stream. Exit code 1 if a schedule's gradient is
    further from serial's than it may be.
    """
    from rollplex.cli.bench import bench_gradients  # noqa: PLC0415 - help stays quick

    code = bench_gradients(
        config,
        overrides=set_ or [],
        responses=responses,
        spread_s=spread,
        limit=only,
        out=out,
        runs_dir=read_environment().runs_dir,
        command=command_line(),
    )
    raise typer.Exit(code)


@bench.command()
def parallel(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the workload, of one device.")],
    *,
    layouts: Annotated[
        str, typer.Option(metavar="LIST", help="Training TP x replicas / rollout TP x engines, with commas; + apart.")
    ] = "4x1/2x2,2x2/1x4,1x4/2x2",
    iterations: Annotated[int, typer.Option(min=1, metavar="N", help="Iterations of each.")] = 5,
    weights: Annotated[
        bool, typer.Option("--weights", help="Compare also the weights after each update: every node writes them.")
    ] = False,
    only: Annotated[int, typer.Option(min=0, metavar="N", help="At most so many nodes; the next call goes on.")] = 0,
    out: options.Folder = None,
    set_: Overrides = None,
    markdown: options.Markdown = False,
) -> None:
    """Compare several devices with one.

    Each iteration of each layout goes on from the one device's checkpoint and replays its responses. Exit code 1 if a
    gradient is further from the one device's than it may be.
    """
    from rollplex.cli.bench import bench_parallel  # noqa: PLC0415 - help stays quick

    code = bench_parallel(
        config,
        overrides=set_ or [],
        layouts=layouts,
        iterations=iterations,
        limit=only,
        weights=weights,
        out=out,
        runs_dir=read_environment().runs_dir,
        markdown=markdown,
        command=command_line(),
    )
    raise typer.Exit(code)


bench.command()(bench_devices.refresh)
bench.command()(bench_devices.placements)


@bench.command()
def gap(
    run_dir: options.RunDir,
    *,
    exact: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR",
            help="A run that replayed the same responses with model.dtype=float32: tells what rounding alone costs.",
        ),
    ] = None,
) -> None:
    """Compare log-probabilities.

    Those of rollout and trainer, by row and by iteration, of a run with run.log_tokens. Exit code 1 if a row's mean gap
    is too large.
    """
    from rollplex.cli.bench import bench_gap  # noqa: PLC0415 - help stays quick

    raise typer.Exit(bench_gap(run_dir, exact))


@bench.command()
def hbm(
    run_dir: options.RunDir,
    *,
    warmup: Annotated[int, typer.Option(min=0, metavar="N", help="So many first iterations do not count.")] = 1,
) -> None:
    """Compare a GPU's memory with the books.

    Peaks of every phase against leases and overhead, over the iterations of a run. Exit code 1 if they are too far
    apart, or a peak has grown.
    """
    from rollplex.cli.bench import bench_hbm  # noqa: PLC0415 - help stays quick

    raise typer.Exit(bench_hbm(run_dir, warmup=warmup))


@bench.command()
def memory(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where rows and run go.")],
    *,
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="Rows, one picture each.")] = 2000,
    image_bytes: Annotated[int, typer.Option(min=10_000, metavar="N", help="Size of a picture's file.")] = 1_000_000,
    epochs: Annotated[int, typer.Option(min=2, metavar="N", help="Passes over the rows.")] = 3,
    prompts: Annotated[int, typer.Option(min=1, metavar="N", help="Prompts of each iteration.")] = 16,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw it: *.svg or *.png.")] = None,
) -> None:
    """Watch memory over epochs of images.

    The resident memory of every process. Exit code 1 if it grows.
    """
    from rollplex.bench.plot import check_plot, write_memory_plot  # noqa: PLC0415 - help stays quick
    from rollplex.bench.soak import lines, soak  # noqa: PLC0415
    from rollplex.cli.output import say  # noqa: PLC0415

    if plot is not None:
        check_plot(plot)
    found = soak(folder, rows=rows, image_bytes=image_bytes, epochs=epochs, prompts=prompts, say=say)
    for line in lines(found):
        say(line)
    if plot is not None:
        write_memory_plot(found, plot)
    if found.grown:
        raise typer.Exit(1)
