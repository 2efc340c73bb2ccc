"""Descriptors 0, 1 and 2, which whoever started a program may have left closed.

The next file that is opened would get such a number, and what is meant for a terminal would be written into it: a
journal, say. Imports nothing that takes time.
"""

from __future__ import annotations

import os
import sys


def open_standard_streams() -> None:
    """Each of them that is closed leads nowhere from now on. Before anything else is opened."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    # Python has none of a descriptor that was closed when it started.
    present: dict[str, object] = {name: getattr(sys, name) for name in ("stdin", "stdout", "stderr")}
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if present[name] is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
