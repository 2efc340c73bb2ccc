"""`rollplex up --dry-run`: a real coordinator checks a configuration in a run directory that is removed again."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rollplex.cli.child import run_child
from rollplex.cli.start import Prepared, coordinator_command, prepare
from rollplex.config.environment import child_environment
from rollplex.errors import ConfigError
from rollplex.protocol.claim import holder_of
from rollplex.protocol.rundir import RunDir, check_path
from rollplex.stop_signals import EXIT_INTERRUPTED, to_take

LOG_LINES = 10
_FAILED = 1


def dry_run(
    file: Path,
    overrides: Sequence[str],
    run_dir: Path | None,
    *,
    iterations: int | None,
    serve: bool,
    say: Callable[[str], None],
    command: Callable[[Prepared], list[str]] | None = None,
) -> int:
    """Check what `rollplex up` would check before it loads the model; the exit code, 0 if it can run.

    Args:
        run_dir: where the run would leave its files: only whether it could.
        say: gets the last lines of the children's logs if they failed; the coordinator says everything else itself.
        command: how the coordinator is started.

    Raises:
        ConfigError: as `prepare`, or the run directory cannot be used.
        RollplexError: the coordinator cannot be started, or was killed.
    """
    if run_dir is not None:
        _check_free(run_dir)
    with _signals_noted() as received:
        folder = Path(tempfile.mkdtemp(prefix="rollplex-"))
        try:
            prepared = prepare(file, overrides, folder / "r", folder)
            made = command or (
                lambda p: coordinator_command(p, iterations=iterations, serve=serve, die_with_parent=True, dry_run=True)
            )
            config = prepared.config
            grace_s = 2.0 * config.deadlines.leave_s + 5.0
            environment = child_environment(threads=config.run.threads)
            code = run_child(made(prepared), grace_s=grace_s, environment=environment)
            if code == _FAILED:
                for line in _last_lines(prepared.run_dir / "logs"):
                    say(line)
        finally:
            shutil.rmtree(folder)
    if received:
        return EXIT_INTERRUPTED if received[0] == signal.SIGINT else 0
    return code


def _check_free(run_dir: Path) -> None:
    check_path(RunDir(run_dir.absolute()))
    if holder := holder_of(run_dir):
        raise ConfigError(
            "Another coordinator holds this run directory",
            got=f"pid {holder.pid} on {holder.host}, run {holder.run_id}",
            needed="one coordinator per run directory",
            do="Stop it, or choose another run directory",
            where=str(run_dir),
        )


@contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Signals that come while there is something to remove only leave a note; to the coordinator they go as ever."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in to_take()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _last_lines(logs: Path) -> Iterator[str]:
    """What the children wrote last: their logs are about to be removed."""
    for path in sorted(logs.glob("*.log")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        if lines:
            yield f"last lines of the {path.stem} process:"
            yield from (f"  {line}" for line in lines[-LOG_LINES:])
