"""How much may be read of past runs at once: the core shares its process, and must not wait for a reader of history."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rollplex_coordinator.archive.runs import Archive
from rollplex_coordinator.http.errors import UnavailableError

READERS = 2
WAIT_S = 10.0


class Past:
    """The archive, for at most READERS requests at once."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self._free = threading.BoundedSemaphore(READERS)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Waits for its turn.

        Raises:
            UnavailableError: it did not come within WAIT_S.
        """
        if not self._free.acquire(timeout=WAIT_S):
            raise UnavailableError(
                "too much of past runs is being read",
                got=f"{READERS} readers for {WAIT_S:g} s",
                needed="a free one",
                do="Try again later.",
            )
        try:
            yield
        finally:
            self._free.release()
