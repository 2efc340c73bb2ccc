"""What became of a run, from its journal and its lock; for runs that go on and for those that ended."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from rollplex.checkpoint.folder import CHECKPOINTS, folders
from rollplex.cli.target import JOURNAL_FILE, name_of
from rollplex.errors import JournalError
from rollplex.journal.events import ErrorRaised, IterationDone, RunEnded, RunStarted
from rollplex.journal.reader import Reader
from rollplex.protocol.claim import Holder, holder_of

_EXIT_REFUSED = 2
_STOPPED = "stopped by "
"""How the reason of a run begins that somebody stopped (`rollplex_coordinator.processes.stop`)."""
_UNUSED = "no coordinator has worked here, or one is just being started"
_SILENT = "it ended without a word: killed, or the machine went down"


class State(StrEnum):
    """How a run stands."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"
    REFUSED = "refused"
    """Its configuration could not run."""
    KILLED = "killed"
    """It ended without a word: SIGKILL, or the machine."""
    NOT_STARTED = "not started"
    """It was prepared, and has no journal."""
    UNREADABLE = "unreadable"
    """Its journal cannot be read."""


class Summary(Struct, frozen=True, kw_only=True):
    """One run. Times are seconds since 1970."""

    name: str
    run_dir: str
    run: str
    """Its id; empty if it has not come so far."""
    state: State
    started_s: float | None = None
    ended_s: float | None = None
    iterations: int = 0
    iterations_wanted: int | None = None
    """How many it was started for; None: not written down."""
    reward: float | None = None
    """Of the last iteration."""
    checkpoint: str | None = None
    """The newest."""
    reason: str = ""
    """Why it ended, in words."""
    log_path: str = ""
    """Which log says more about an error."""


def summarize(run_dir: Path, runs_dir: Path) -> Summary:
    """Look at one run. A journal that cannot be read is a state, not an error."""
    holder = holder_of(run_dir)
    base = Summary(
        name=name_of(run_dir, runs_dir),
        run_dir=str(run_dir),
        run=holder.run_id if holder else "",
        state=State.RUNNING if holder else State.NOT_STARTED,
        reason="" if holder else _UNUSED,
        checkpoint=str(found[-1]) if (found := folders(run_dir / CHECKPOINTS)) else None,
    )
    if not (run_dir / JOURNAL_FILE).is_file():
        return base
    try:
        with Reader(run_dir / JOURNAL_FILE) as reader:
            return _read(base, reader, holder)
    except JournalError as error:
        return replace(base, state=State.RUNNING if holder else State.UNREADABLE, reason=str(error))


def _read(base: Summary, reader: Reader, holder: Holder | None) -> Summary:
    newest = reader.newest(RunStarted)
    if newest is None or (holder and holder.run_id != newest[1].run):
        return base  # it is only starting: what the journal tells is of an earlier one
    row, started = newest
    iteration = reader.newest(IterationDone)
    done = iteration[1] if iteration else None
    found = replace(
        base,
        run=started.run,
        started_s=row.wall_s,
        reason="",
        iterations=done.step + 1 if done else 0,
        iterations_wanted=started.iterations_wanted,
        reward=done.metrics.get("reward") if done else None,
    )
    if holder:
        return found
    (last,) = reader.rows_after(reader.last_id() - 1, 1)
    found = replace(found, state=State.KILLED, ended_s=last.wall_s, reason=_SILENT)
    ended = reader.newest(RunEnded, after=row.id)
    if ended is None:
        return found
    error = reader.newest(ErrorRaised, after=row.id)
    return replace(found, state=_state(ended[1]), reason=ended[1].reason, log_path=error[1].log_path if error else "")


def _state(ended: RunEnded) -> State:
    if ended.reason.startswith(_STOPPED):
        return State.STOPPED
    if ended.exit_code == 0:
        return State.DONE
    return State.REFUSED if ended.exit_code == _EXIT_REFUSED else State.FAILED
