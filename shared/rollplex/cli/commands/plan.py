"""`rollplex plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rollplex.cli.commands.arguments import Overrides


def plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of a run.")],
    *,
    set_: Overrides = None,
    shape: Annotated[
        str,
        typer.Option(metavar="NAME", help="A published model instead of a folder: qwen2.5-vl-3b, -7b, -32b, -72b."),
    ] = "",
    gpus: Annotated[int, typer.Option(min=1, metavar="N", help="Devices of the node.")] = 1,
    train_tp: Annotated[int, typer.Option(min=1, metavar="T", help="Tensor-parallel degree of training.")] = 1,
    rollout_tp: Annotated[int, typer.Option(min=1, metavar="R", help="Tensor-parallel degree of rollout.")] = 1,
    rollout_gpus: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Devices that only sample when disaggregated. Default: half; 0: none."),
    ] = None,
    hbm: Annotated[str, typer.Option(metavar="SIZE", help="Memory of each device.")] = "80GiB",
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="The longest prompt, images included. Default: looked up in the data."),
    ] = None,
    image_tokens: Annotated[int, typer.Option(min=0, metavar="N", help="Of these, tokens of images.")] = 0,
    response_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The longest response. Default: rollout.max_new_tokens.")
    ] = None,
    micro_batch: Annotated[
        int, typer.Option(min=1, metavar="N", help="Whole sequences of one backward, where prefixes are not shared.")
    ] = 1,
    baseline_gradients: Annotated[
        str, typer.Option(metavar="DTYPE", help="Of gradients there. Default: that of the model.")
    ] = "",
    optimizer: Annotated[
        Literal["device", "host"], typer.Option(help="Where the optimizer state is; memory.optimizer says it too.")
    ] = "device",
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, in bytes.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it as well: .svg or .png.")] = None,
) -> None:
    """Say what a run would hold on each device, before anything is loaded.

    By phase and kind, with its peak and the cause, for four placements: naive and serial colocation, disaggregation,
    and Rollplex's. Needs neither a GPU nor, with --shape and --prompt-tokens, a model or data.
    """
    from rollplex.cli.output import say  # noqa: PLC0415 - help stays quick
    from rollplex.cli.plan import show_plan  # noqa: PLC0415

    numbers = {"--gpus": gpus, "--train-tp": train_tp, "--rollout-tp": rollout_tp, "--micro-batch": micro_batch}
    given = {"--rollout-gpus": rollout_gpus, "--response-tokens": response_tokens}
    texts = {"--hbm": hbm, "--optimizer": optimizer, "--shape": shape, "--baseline-gradients": baseline_gradients}
    options = [f"{name}={value}" for name, value in (numbers | given | texts).items() if value not in (None, "")]
    code = show_plan(
        config,
        set_ or [],
        options,
        prompt_tokens=prompt_tokens,
        image_tokens=image_tokens,
        as_json=as_json,
        plot=plot,
        say=say,
    )
    raise typer.Exit(code)
