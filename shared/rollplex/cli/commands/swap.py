"""`rollplex swap`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from rollplex.cli.commands.arguments import RunOption
from rollplex.config.environment import read_environment

SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""What follows the role is the program's, options too."""


def swap(
    role: Annotated[Literal["rollout", "prefix", "trainer"], typer.Argument(help="Whose place is taken.")],
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...|IMAGE", help="A program and its arguments, or a container image.")
    ],
    *,
    run: RunOption = None,
    wait: Annotated[bool, typer.Option(help="Wait for what becomes of it.")] = True,
) -> None:
    """Replace a rollout, prefix or trainer service of a live run by another program, between two iterations.

    The newcomer is tested first, as `rollplex conformance` does, while the run goes on. If it fails, or does not get as
    far as its first iteration, the old program keeps the place. Exit code 1 then.
    """
    from rollplex.cli.output import say  # noqa: PLC0415 - help stays quick
    from rollplex.cli.services import replace_service  # noqa: PLC0415
    from rollplex.cli.target import find_run  # noqa: PLC0415

    run_dir = find_run(run, read_environment().runs_dir)
    raise typer.Exit(replace_service(run_dir, role, command, wait=wait, say=say))
