"""What can be written down: in YAML, JSON and messages every text is UTF-8."""

from __future__ import annotations

import sys
from pathlib import Path

from rollplex.errors import ConfigError


def require_text(path: Path, where: str) -> None:
    """Whether a path, from the root on, is one that a run can write down.

    Args:
        where: which path it is, for the error.

    Raises:
        ConfigError: some bytes of it are no text, or Python was told to read them as if they were none.
    """
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            "A path is not UTF-8 text",
            got=ascii(str(path.absolute())),
            needed=f"UTF-8; this Python takes paths for {sys.getfilesystemencoding()}",
            do="Rename the folder, or take another one; under LC_ALL=C unset PYTHONUTF8=0.",
            where=where,
        ) from None
