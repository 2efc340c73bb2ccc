"""What SGLang leaves outside an engine's folder, for SGLang 0.5.17.

Owns: the note, in that folder, of the file by which SGLang's processes tell each other how busy they are. It lies in
/dev/shm under a name that is drawn, and only an orderly end would remove it, to which a rollout process seldom comes;
whoever removes the folder removes the file.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Final

SHARED: Final = Path("/dev/shm")  # noqa: S108 - where SGLang makes it
_BEGINNING: Final = "sglang_loads_"
_NOTE: Final = "shared_file"


def note(folder: Path, file: Path) -> None:
    """Before the file is made."""
    (folder / _NOTE).write_text(file.name)


def noted(folder: Path) -> Path | None:
    """The file; None if none is noted that SGLang could have made, or not yet."""
    name = ""
    with contextlib.suppress(FileNotFoundError):  # it ended before it had one
        name = (folder / _NOTE).read_text()
    return SHARED / name if name.startswith(_BEGINNING) and Path(name).name == name else None


def remove(folder: Path) -> None:
    """The folder and the file, as far as they may be removed: of processes that are gone, or end now."""
    file = noted(folder)
    if file is not None:
        with contextlib.suppress(PermissionError):  # another user's by now
            file.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
