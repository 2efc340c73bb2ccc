"""One byte that says whether prefix work runs beside the rollout now.

The coordinator, which knows, writes it into a file of the run directory; a rollout engine that can decode on more or
fewer multiprocessors maps the file and looks before each step. It is a hint: what is computed is the same either way,
and a process that never looks is right too. A byte cannot be torn, so nobody waits for anybody.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final, Protocol

FILE: Final = "beside"
_YES, _NO = b"\1", b"\0"


class Notice(Protocol):
    """Where it is said."""

    def say(self, *, beside: bool) -> None: ...


class Silent:
    """Nobody looks."""

    def say(self, *, beside: bool) -> None:
        pass


class Beside:
    """Says it in the file.

    Args:
        run_dir: the run's directory; the file is made in it, saying no.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / FILE
        os.close(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        self._said = True
        self.say(beside=False)

    def say(self, *, beside: bool) -> None:
        """Prefix work runs beside the rollout, or does not.

        Raises:
            OSError: the file cannot be written.
        """
        if beside == self._said:
            return
        with self._file.open("r+b", buffering=0) as file:  # in place: others have it mapped
            file.write(_YES if beside else _NO)
        self._said = beside


class Watch:
    """Looks at the file, without a system call.

    Args:
        run_dir: the run's directory.

    Raises:
        OSError: there is no such file.
        ValueError: it is empty.
    """

    def __init__(self, run_dir: Path) -> None:
        with (run_dir / FILE).open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)

    def __call__(self) -> bool:
        """Whether prefix work runs beside the rollout."""
        return self._map[0] == 1
