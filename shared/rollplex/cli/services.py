"""Carries out `rollplex services` and `rollplex swap`: by the control API of a live run."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rollplex.cli.api import Api, Service, Swap, connect
from rollplex.cli.interrupts import Interrupted, interruptible
from rollplex.cli.output import columns
from rollplex.config.loading import load
from rollplex.errors import ConfigError
from rollplex.programs import own
from rollplex.terminal.words import duration

LOOK_EVERY_S = 0.5
EXIT_REFUSED = 1
DOCKER = "docker"


def as_json(run_dir: Path) -> str:
    """Every service of a live run, for programs. Raises StateError, WaitError as `connect`."""
    with connect(run_dir) as api:
        return msgspec.json.format(msgspec.json.encode(api.services())).decode()


def table(run_dir: Path) -> str:
    """Every service of a live run, in columns. Raises StateError, WaitError as `connect`."""
    with connect(run_dir) as api:
        found, now_s = api.services(), time.time()
    rows = [("service", "state", "incarnation", "pid", "since", "program")]
    return columns([*rows, *(_row(service, now_s) for service in found)])


def replace_service(
    run_dir: Path, role: str, command: Sequence[str], *, wait: bool, say: Callable[[str], object]
) -> int:
    """Ask for a replacement and, if asked to wait, tell how it ended; the exit code.

    A signal ends the waiting, not the replacement.

    Raises:
        ConfigError: a program that is not there, and no container engine for an image of that name.
        StateError: this service cannot be replaced, or not now; or the run has ended.
    """
    program = program_of(command, run_dir)
    with connect(run_dir) as api:
        api.swap(role, program)
        say(f"{role}: testing {shlex.join(program)}")
        if not wait:
            return 0
        try:
            with interruptible():
                return _follow(api, say)
        except Interrupted as interrupted:
            return interrupted.exit_code


def program_of(command: Sequence[str], run_dir: Path) -> list[str]:
    """The program that is meant, by its full path, and so are arguments that are files here, since the coordinator may
    work elsewhere; of an image, what runs a container of it.

    Raises:
        ConfigError: neither is to be had.
    """
    name, *arguments = command
    if (found := shutil.which(name)) is not None:
        here = [str(Path(word).absolute()) if Path(word).is_file() else word for word in arguments]
        return [str(Path(found).absolute()), *here]
    if arguments or name.startswith((".", "/")):
        raise ConfigError("There is no such program", got=name, needed="one that can be run", where="COMMAND")
    if (engine := shutil.which(DOCKER)) is None:
        raise ConfigError(
            "Neither such a program nor a container engine is here",
            got=name,
            needed=f"a program on the path, or `{DOCKER}` to run it as an image",
            where="COMMAND",
        )
    return container(name, engine, run_dir)


def container(image: str, engine: str, run_dir: Path) -> list[str]:
    """What runs a service in a container: it sees the run directory, the model and the folder of the conformance test
    under their own paths, and no network. An image that is not here is not fetched: it may be a misspelt program."""
    model = load(run_dir / "config.yaml", []).model.path
    places = {str(run_dir.resolve()): "", str(Path(model).resolve()): ":ro", tempfile.gettempdir(): ""}
    volumes = [part for place, mode in places.items() for part in ("--volume", f"{place}:{place}{mode}")]
    user = f"{os.getuid()}:{os.getgid()}"
    return [
        *own("rollplex.worker.container", engine),
        *("--pull", "never", "--network", "none", "--user", user, *volumes, image),
    ]


def _follow(api: Api, say: Callable[[str], object]) -> int:
    said = "testing"
    while True:
        swap = api.status().swap
        if swap is None or swap.state == "swapped":
            say(f"{'' if swap is None else swap.role} has been replaced" + ("" if swap is None else f"; {_from(swap)}"))
            return 0
        if swap.state == "refused":
            say(f"{swap.role} stays: refused by {swap.case}: got {swap.got}; needed {swap.needed}")
            return EXIT_REFUSED
        if swap.state != said:
            said = swap.state
            say(f"{swap.role}: the newcomer conforms and waits for the end of the iteration")
        time.sleep(LOOK_EVERY_S)


def _from(swap: Swap) -> str:
    return "at the next iteration" if swap.step is None else f"from iteration {swap.step + 1} on"


def _row(service: Service, now_s: float) -> tuple[str, ...]:
    since = "" if service.since_wall_s is None else duration(max(0.0, now_s - service.since_wall_s))
    program = shlex.join(service.command) if service.command else "(not started here)"
    return service.service, service.state, str(service.incarnation), str(service.pid), since, program
