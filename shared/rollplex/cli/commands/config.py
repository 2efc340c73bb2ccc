"""`rollplex config show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollplex.config.environment import read_environment

config = typer.Typer(name="config", help="Look at configurations.", no_args_is_help=True)


@config.command()
def show(
    target: Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="YAML file; or a run, for what it ran with.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=V", help="Override a key. May be repeated.")
    ] = None,
) -> None:
    """Write a configuration out with every default.

    As YAML that `rollplex up` takes. The files that it names need not be there.
    """
    from rollplex.cli.output import say  # noqa: PLC0415 - help stays quick
    from rollplex.cli.start import CONFIG_FILE  # noqa: PLC0415
    from rollplex.cli.target import find_run  # noqa: PLC0415
    from rollplex.config import dump, load  # noqa: PLC0415

    if target.is_file():
        text = dump(load(target, set_ or [], check_files=False))
    else:
        file = find_run(target, read_environment().runs_dir) / CONFIG_FILE
        text = dump(load(file, set_, check_files=False)) if set_ else file.read_text(encoding="utf-8")
    say(text.rstrip("\n"))
