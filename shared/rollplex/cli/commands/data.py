"""`rollplex data check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

data = typer.Typer(name="data", help="Look at datasets.", no_args_is_help=True)


@data.command()
def check(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Dataset: a file or a folder. Default: data.path of --config.")
    ] = None,
    *,
    config: Annotated[
        Path | None, typer.Option(metavar="CONFIG", help="YAML file of a run: its model, and how it reads data.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Model folder. Without one, prompts are not tokenized.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=V", help="Override a key, e.g. data.shape=verl. May be repeated."),
    ] = None,
    image_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the images. Default: that of FILE.")
    ] = None,
    headers: Annotated[
        bool, typer.Option("--headers", help="Read images' headers only; the default is to decode each image.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="End with 1 for warnings too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check a dataset as a run would.

    Every row; and show what is in it.

    Ends with 0 if all rows are good, with 1 if some are not, with 2 if the dataset cannot be read at all.
    """
    from rollplex.cli.data_check import check_dataset  # noqa: PLC0415 - help stays quick
    from rollplex.cli.output import say  # noqa: PLC0415

    code = check_dataset(
        file,
        config=config,
        model=model,
        overrides=set_ or [],
        image_dir=image_dir,
        decode=not headers,
        strict=strict,
        as_json=as_json,
        say=say,
    )
    raise typer.Exit(code)
