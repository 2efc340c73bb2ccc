"""The process that started this one, where it says so: whoever it started is to go when it is gone.

Once a worker has joined, the end of its stream tells it of its coordinator's end. Before, this does.
"""

from __future__ import annotations

import os
import select
from collections.abc import Mapping
from typing import Final

VARIABLE: Final = "ROLLPLEX_STARTED_BY"
"""A pid on this host."""


class Starter:
    """See above. Of a process that nobody named, `gone` stays false."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.gone = False
        self._pidfd = -1
        text = variables.get(VARIABLE, "")
        if text.isdecimal():
            try:
                self._pidfd = os.pidfd_open(int(text))
            except OSError:
                self.gone = True

    def look(self) -> bool:
        """Whether it has ended."""
        if self._pidfd >= 0 and select.select([self._pidfd], [], [], 0)[0]:
            self.close()
            self.gone = True
        return self.gone

    def close(self) -> None:
        """It is not looked at any more. Again: nothing happens."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
