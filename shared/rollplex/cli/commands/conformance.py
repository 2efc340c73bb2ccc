"""`rollplex conformance`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""What follows the role is the program's, options too."""


def conformance(
    role: Annotated[Literal["rollout", "prefix", "trainer"], typer.Argument(help="Whose place it is to take.")],
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="The program and its arguments.")],
    *,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report there too, as JSON.")] = None,
    case: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Judge this case only. May be repeated.")
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="Stop at the first failure.")] = False,
) -> None:
    """Say whether a program may take the place of a service.

    Starts it several times, drives it through docs/protocol.md with a tiny model, and judges what it answers, when, and
    what it leaves behind. `--run-dir DIR --device 0:0 --incarnation 1` follow its arguments. Exit code 1 if it fails.
    """
    from rollplex.cli.conformance import run_conformance  # noqa: PLC0415 - help stays quick

    raise typer.Exit(run_conformance(role, command, json_file=json, cases=case or [], stop=stop))
