"""`rollplex up --resume`: which run and checkpoint are meant, then the coordinator by exec."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rollplex.checkpoint.folder import CHECKPOINTS
from rollplex.cli.start import become, resume_command
from rollplex.cli.target import find_run
from rollplex.config.environment import read_environment


def go_on(
    place: Path,
    config: Path | None,
    overrides: Sequence[str],
    *,
    accepted: Sequence[str],
    iterations: int | None,
    serve: bool,
) -> NoReturn:
    """Become the coordinator that goes on with a run.

    Args:
        place: a run (directory or name), or one of its checkpoint folders.

    Raises:
        ConfigError: no such run, or a configuration that cannot run.
        RollplexError: the coordinator cannot be started.
    """
    run, checkpoint = meant(place)
    run_dir = find_run(run, read_environment().runs_dir)
    become(
        resume_command(
            run_dir,
            config,
            overrides,
            checkpoint=checkpoint,
            accepted=accepted,
            iterations=iterations,
            serve=serve,
        )
    )


def meant(place: Path) -> tuple[Path, Path | None]:
    """The run, and the checkpoint if one was named: RUN/checkpoints/step_N."""
    absolute = place.absolute()
    if absolute.parent.name == CHECKPOINTS:
        folder = absolute.resolve()  # checkpoints/latest, runs/latest and `..` mean what they lead to
        return folder.parent.parent, folder
    return place, None
