"""Tables of samples in the run directory: RUN/samples/step_<step>.html for people, step_<step>.json with all of it.

Owns the files and which of them a resumed run keeps. A disk that refuses is told once and fails nothing: everything
that a run needs is elsewhere.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import msgspec

from rollplex.whole_file import write_whole
from rollplex_coordinator.records.sample_page import page
from rollplex_coordinator.records.sample_table import SampleTable

FOLDER = "samples"
_NAME = re.compile(r"step_(\d+)\.(?:html|json)")

log = logging.getLogger("rollplex.coordinator")


class SampleFiles:
    """The tables of one run; the folder is made with the first one."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._refused = False

    def write(self, table: SampleTable) -> None:
        """Both files of a step, each in one rename; those that are there are replaced."""
        if self._refused:
            return
        try:
            self._folder.mkdir(exist_ok=True)
            write_whole(self._folder / f"step_{table.step}.json", msgspec.json.encode(table))
            write_whole(self._folder / f"step_{table.step}.html", page(table).encode())
        except OSError as error:
            self._refused = True
            log.warning(
                "samples cannot be written, and are left out from here on: %s. Free space in %s, or set "
                "run.sample_every to 0",
                error,
                self._folder,
            )


def move_later(run_dir: Path, step: int, attempt: Path) -> None:
    """Move the tables of `step` and later ones from the run to an attempt's folder.

    Raises:
        OSError: one cannot be moved.
    """
    folder = run_dir / FOLDER
    names = [path for path in folder.iterdir() if _step(path) >= step] if folder.is_dir() else []
    if names:
        (attempt / FOLDER).mkdir()
    for path in names:
        path.rename(attempt / FOLDER / path.name)


def _step(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else -1
