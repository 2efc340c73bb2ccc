"""Which runs there are: this one, its earlier attempts, and those beside it in the runs folder.

Owns the names by which they are asked for. A name is looked up in what was found on disk and never becomes part of a
path; links are not followed, and another user's folders are left alone. Reads only; one broken run is a state of that
run, not an error of the list.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from rollplex.cli.summary import State, Summary, summarize
from rollplex.cli.target import JOURNAL_FILE, is_run, name_of, written_at
from rollplex.errors import RollplexError
from rollplex.journal.events import ErrorRaised, RunStarted
from rollplex.journal.reader import Reader

MAX_RUNS = 200
"""The newest are listed."""
MAX_ATTEMPTS = 50
_INNER = "run"
_ENDED_BADLY = (State.FAILED, State.REFUSED)


class Found(Struct, frozen=True, kw_only=True):
    """One run directory, or what an earlier attempt in it left."""

    name: str
    attempt: int
    """0: the records that are the run's own now; from 1 on: RUN/attempts/N."""
    folder: Path
    summary: Summary
    schedule: str = ""
    error: ErrorRaised | None = None
    """That ended it."""


class Archive:
    """The runs of one folder. May be used from any thread.

    Args:
        runs_dir: where runs lie; need not exist.
        own: the run directory of this coordinator; None: there is none. It is listed wherever it lies.
    """

    def __init__(self, runs_dir: Path, own: Path | None = None) -> None:
        self.runs_dir = runs_dir.absolute()
        self._own = None if own is None else own.absolute().resolve()
        self._lock = threading.Lock()
        self._known: dict[Path, tuple[float, Found]] = {}

    @classmethod
    def around(cls, run_dir: Path) -> Archive:
        """The archive of a run directory and its neighbours; a demo's folder holds its run directory as `run`."""
        run_dir = run_dir.absolute().resolve()
        return cls(run_dir.parent.parent if run_dir.name == _INNER else run_dir.parent, run_dir)

    def runs(self) -> list[Found]:
        """The newest runs, newest first, each followed by its earlier attempts, newest first."""
        found: list[Found] = []
        for name, folder in self._named().items():
            found += [self._look(name, number, path) for number, path in _with_attempts(folder)]
        return found

    def is_own(self, found: Found) -> bool:
        """Whether it is the run of this coordinator, as it is now."""
        return found.attempt == 0 and found.folder == self._own

    def folder(self, name: str, attempt: int) -> Path | None:
        """The folder of a run by its name in the list, or by "this"; None: there is no such run or attempt."""
        run_dir = self._own if name == "this" else self._named().get(name)
        return None if run_dir is None else dict(_with_attempts(run_dir)).get(attempt)

    def _named(self) -> dict[str, Path]:
        folders = sorted(_runs_in(self.runs_dir.resolve()), key=_written, reverse=True)[:MAX_RUNS]
        if self._own is not None and self._own not in folders:
            folders.insert(0, self._own)
        return {name_of(folder, self.runs_dir): folder for folder in folders}

    def _look(self, name: str, attempt: int, folder: Path) -> Found:
        """What became of it; of a run that has ended and was looked at before, from memory."""
        at = _written(folder)
        with self._lock:
            known = self._known.get(folder)
        if known is not None and known[0] == at and known[1].summary.state is not State.RUNNING:
            return known[1]
        found = Found(name=name, attempt=attempt, folder=folder, summary=_summary(folder, self.runs_dir))
        if found.summary.started_s is not None:
            found = _detailed(found)
        with self._lock:
            self._known[folder] = (at, found)
        return found


def _written(folder: Path) -> float:
    try:
        return written_at(folder)
    except OSError:  # it is going away just now
        return 0.0


def _runs_in(runs_dir: Path) -> list[Path]:
    """Run directories in the folder, and in demos' folders there, that belong to our user."""
    try:
        folders = sorted(runs_dir.iterdir())
    except OSError:  # there is none, or it is not ours to look at
        return []
    found = (_run_of(folder) for folder in folders)
    return [path for path in found if path is not None]


def _run_of(folder: Path) -> Path | None:
    """The folder itself, or the run directory in it, if it is one."""
    try:
        if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.geteuid():
            return None
        inner = folder / _INNER
        return next((path for path in (folder, inner) if is_run(path) and not _links(path)), None)
    except OSError:  # it is not ours to look at, or is going away just now
        return None


def _links(path: Path) -> bool:
    """It, or its journal, is a link to somewhere else."""
    return path.is_symlink() or (path / JOURNAL_FILE).is_symlink()


def _with_attempts(run_dir: Path) -> list[tuple[int, Path]]:
    folder = run_dir / "attempts"
    try:
        entries = list(folder.iterdir()) if not folder.is_symlink() else []
        numbers = sorted(
            {int(path.name) for path in entries if path.name.isdecimal() and not _links(path)}, reverse=True
        )
    except OSError:  # there are none, or they are not ours to look at
        numbers = []
    return [(0, run_dir), *((number, folder / str(number)) for number in numbers[:MAX_ATTEMPTS] if number > 0)]


def _summary(folder: Path, runs_dir: Path) -> Summary:
    try:
        return summarize(folder, runs_dir)
    except (RollplexError, OSError) as error:
        return Summary(name=folder.name, run_dir=str(folder), run="", state=State.UNREADABLE, reason=str(error))


def _detailed(found: Found) -> Found:
    """With its schedule, and the error that ended it."""
    try:
        with Reader(found.folder / JOURNAL_FILE) as reader:
            started = reader.newest(RunStarted)
            if started is None:
                return found
            error = None
            if found.summary.state in _ENDED_BADLY:
                error = reader.newest(ErrorRaised, after=started[0].id)
            return replace(found, schedule=started[1].schedule, error=None if error is None else error[1])
    except RollplexError:  # it was readable a moment ago, and its summary says how it stands
        return found
