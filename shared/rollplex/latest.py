"""Links named `latest`, to the newest checkpoint of a run and to the newest run of a folder.

Owns how such a link is made: relative, so that the folder can be moved, and in one rename, so that there is always one.
Knows nothing of what it points to.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path

NAME = "latest"


def link_latest(folder: Path, target: Path) -> str:
    """Make `folder`/latest a link to `target`, which lies in `folder`.

    What has that name and is no link is left alone; nothing else depends on the link, so no error is raised.

    Returns:
        Why there is no such link now, as a sentence for the user; empty if there is.
    """
    link = folder / NAME
    new = folder / f".tmp-{NAME}-{uuid.uuid4().hex}"
    try:
        if os.path.lexists(link) and not link.is_symlink():
            return f"{link} is no link and is left alone: it does not lead to {target.name}"
        new.symlink_to(target.relative_to(folder))
        new.replace(link)
        _sync(folder)
    except OSError as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        return f"{link} cannot be made to lead to {target.name}: {error}"
    return ""


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
