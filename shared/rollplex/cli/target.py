"""Which run a command means. Knows where runs lie and which of them live; nothing of what is in one.

given      a run directory; a demo's folder, which holds `run`; or the name of either in the runs folder
not given  the run that lives; if none does, the newest (`latest` in the runs folder, or by its journal)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollplex.errors import ConfigError
from rollplex.latest import NAME as LATEST
from rollplex.protocol.claim import holder_of
from rollplex.protocol.rundir import RunDir

JOURNAL_FILE = "journal.sqlite"
_INNER = "run"
"""In a demo's folder: its run directory."""


def find_run(run: Path | None, runs_dir: Path) -> Path:
    """The run directory that is meant, with links resolved.

    Args:
        run: as the user gave it, see the module; None: the one that lives, else the newest.
        runs_dir: where runs lie that were given no directory of their own; need not exist.

    Raises:
        ConfigError: there is no such run, or several live and none was named.
    """
    if run is not None:
        return _named(run, runs_dir)
    live = live_runs(runs_dir)
    if len(live) > 1:
        raise ConfigError(
            "Several runs are going on",
            got=", ".join(name_of(path, runs_dir) for path in live),
            needed="one of them",
            do="Name it: --run NAME",
            where=str(runs_dir),
        )
    if live:
        return live[0]
    if is_run(latest := runs_dir / LATEST):
        return latest.resolve()
    if runs := all_runs(runs_dir):
        return max(runs, key=written_at)
    raise ConfigError(
        "There is no run",
        needed="one in this folder, or one named by --run DIR (ROLLPLEX_RUNS_DIR names another folder)",
        do="Start one with `rollplex demo --quick` or `rollplex up CONFIG`.",
        where=str(runs_dir),
    )


def all_runs(runs_dir: Path) -> list[Path]:
    """Every run directory in the runs folder and in demo folders there, resolved, by name; links are left out."""
    if not runs_dir.is_dir():
        return []
    folders = sorted(path for path in runs_dir.resolve().iterdir() if path.is_dir() and not path.is_symlink())
    return [path for folder in folders for path in _run_of(folder)]


def live_runs(runs_dir: Path) -> list[Path]:
    """Those of `all_runs` that a coordinator holds now."""
    return [path for path in all_runs(runs_dir) if holder_of(path) is not None]


def is_run(path: Path) -> bool:
    """Whether a coordinator has ever worked in this directory (one of its attempts too)."""
    return (path / JOURNAL_FILE).is_file() or RunDir(path).lock_file.is_file()


def name_of(run_dir: Path, runs_dir: Path) -> str:
    """The shortest name by which `find_run` finds it."""
    folder = run_dir.parent if run_dir.name == _INNER else run_dir
    return folder.name if folder.parent == runs_dir.resolve() else str(run_dir)


def written_at(run_dir: Path) -> float:
    """When its journal was last written to, as seconds since 1970; where there is none, the directory.

    What is not in the database yet is in its write-ahead log. Reading a journal makes an empty one: that counts not.
    """
    journal, log = run_dir / JOURNAL_FILE, run_dir / f"{JOURNAL_FILE}-wal"
    files = [path for path in (journal, log) if path.is_file()]
    written = [info.st_mtime for info in map(Path.stat, files) if info.st_size]
    return max(written, default=run_dir.stat().st_mtime)


def _run_of(folder: Path) -> Iterator[Path]:
    """The folder itself, or the run directory in it, if it is one."""
    for path in (folder, folder / _INNER):
        if is_run(path):
            yield path
            return


def _named(run: Path, runs_dir: Path) -> Path:
    places = [run] if run.is_absolute() else [run, runs_dir / run]
    for place in places:
        for path in _run_of(place):
            return path.resolve()
    known = [name_of(path, runs_dir) for path in sorted(all_runs(runs_dir), key=written_at, reverse=True)]
    raise ConfigError(
        "There is no such run",
        got=str(run),
        needed=f"a run directory, or a name in {runs_dir}"
        + (f": {', '.join(known[:5])}{', …' if len(known) > 5 else ''}" if known else ", which has no run"),
        do="`rollplex runs` lists them.",
    )
