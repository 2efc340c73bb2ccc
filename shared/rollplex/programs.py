"""Our own programs, as commands. Owns how Python is started for them; knows nothing of what they do."""

from __future__ import annotations

import sys


def own(module: str, *arguments: str) -> list[str]:
    """The command of one of our modules, with this interpreter.

    `-P`: its modules come from where Python and its packages are. Without it `python -m` looks into the current folder
    first, where a file of the user's with the name of one of Python's (random.py) would be run instead.
    """
    return [sys.executable, "-P", "-m", module, *arguments]
