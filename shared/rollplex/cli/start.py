"""How a run is started: its directory, its resolved configuration, the coordinator's command line."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rollplex.cli.signals import hold_back
from rollplex.config import Config, dump, load
from rollplex.errors import RollplexError
from rollplex.latest import NAME as LATEST
from rollplex.latest import link_latest
from rollplex.programs import own
from rollplex.protocol.claim import claim
from rollplex.whole_file import write_whole

CONFIG_FILE = "config.yaml"
"""In the run directory: the configuration of the run, every default written out."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that can be started."""

    config: Config
    config_file: Path
    run_dir: Path


def prepare(
    file: Path, overrides: Sequence[str], run_dir: Path | None, runs_dir: Path, *, latest: bool = True
) -> Prepared:
    """Check the configuration and write it, resolved, into the run directory; the runs folder's `latest` leads to it.

    Args:
        file: the user's YAML file.
        overrides: `a.b=v` each.
        run_dir: where the run leaves its files; None: a new folder in `runs_dir`, by the run's name and the time.
        runs_dir: see `run_dir`.
        latest: whether `latest` of the runs folder is to lead to this run.

    Raises:
        ConfigError: a configuration that cannot run, or a run directory that cannot be used or is in use.
    """
    config = load(file, overrides)
    run_dir = _without_latest(run_dir or fresh(runs_dir, f"{config.run.name}-{timestamp()}"), runs_dir)
    with claim(run_dir, config.run.name):  # so that the configuration of a run that is going on is not overwritten
        config_file = run_dir / CONFIG_FILE
        write_whole(config_file, dump(config).encode())
    wanted = latest and runs_dir.absolute() in run_dir.parents
    if wanted and (problem := link_latest(runs_dir.absolute(), run_dir)):
        sys.stderr.write(f"rollplex: {problem}\n")
    return Prepared(config=config, config_file=config_file, run_dir=run_dir)


def resume_command(
    run_dir: Path,
    file: Path | None,
    overrides: Sequence[str],
    *,
    checkpoint: Path | None,
    accepted: Sequence[str],
    iterations: int | None,
    serve: bool,
) -> list[str]:
    """The coordinator's command line that lets a run go on in its directory.

    The coordinator writes the configuration down once it has accepted it, not before.

    Args:
        file: a configuration that may differ from the run's; None: the run's own.
        checkpoint: to go on from; None: the newest good one.
        accepted: keys whose difference the user wants.

    Raises:
        ConfigError: a configuration that cannot run.
    """
    file = run_dir / CONFIG_FILE if file is None else file
    load(file, overrides)
    command = own("rollplex_coordinator", "--config", str(file), "--run-dir", str(run_dir))
    command += ["--resume"] if checkpoint is None else ["--resume", str(checkpoint)]
    for option, values in (("--set", overrides), ("--accept", accepted)):
        for value in values:
            command += [option, value]
    command += [] if iterations is None else ["--iterations", str(iterations)]
    return [*command, *(["--serve"] if serve else [])]


def _without_latest(run_dir: Path, runs_dir: Path) -> Path:
    """The directory by a path that does not change when a later run becomes the latest."""
    link = runs_dir.absolute() / LATEST
    run_dir = run_dir.absolute()
    return link.resolve() / run_dir.relative_to(link) if run_dir.is_relative_to(link) else run_dir


def timestamp() -> str:
    """The local time for names of folders; short, because a run directory holds sockets, whose paths are limited."""
    return time.strftime("%y%m%d-%H%M%S")


def fresh(folder: Path, name: str) -> Path:
    """`folder`/`name`, or the first of `name`-2, `name`-3, … that is not there."""
    path, number = folder / name, 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}"
    return path


def coordinator_command(
    prepared: Prepared,
    *,
    iterations: int | None = None,
    serve: bool = False,
    die_with_parent: bool = False,
    dry_run: bool = False,
) -> list[str]:
    """The command line of the coordinator for a prepared run."""
    command = own("rollplex_coordinator")
    command += ["--config", str(prepared.config_file), "--run-dir", str(prepared.run_dir)]
    if iterations is not None:
        command += ["--iterations", str(iterations)]
    if serve:
        command.append("--serve")
    if die_with_parent:
        command.append("--die-with-parent")
    if dry_run:
        command.append("--dry-run")
    return command


def become(command: Sequence[str]) -> NoReturn:
    """Replace this process by `command`. SIGINT and SIGTERM wait until it lets them through (see `signals`).

    Raises:
        RollplexError: the program cannot be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    hold_back()
    try:
        os.execv(command[0], list(command))  # noqa: S606 - no shell is wanted
    except OSError as error:
        raise RollplexError("The coordinator cannot be started", got=str(error), where=command[0]) from error
