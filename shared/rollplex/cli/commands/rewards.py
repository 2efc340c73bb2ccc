"""`rollplex rewards check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollplex.cli.commands.arguments import Overrides

rewards = typer.Typer(name="rewards", help="Look at reward functions.", no_args_is_help=True)


@rewards.callback()
def _group() -> None:
    """So that `check` is a command of a group, although it is the only one."""


@rewards.command()
def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")],
    set_: Overrides = None,
    rows: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many rows of the training data, from the first.")
    ] = 5,
) -> None:
    """Call the reward functions as a run would, on three made-up responses to some rows: the right answer as it stands
    in the row, the same in <think></think><answer>…</answer>, and an empty one.

    Exit code 1 if a function fails.
    """
    from rollplex.cli.output import say  # noqa: PLC0415 - help stays quick
    from rollplex.cli.rewards import check_rewards  # noqa: PLC0415

    raise typer.Exit(check_rewards(config, set_ or [], num_rows=rows, say=say))
