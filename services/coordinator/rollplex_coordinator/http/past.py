"""How much may be read of past runs at once: the core shares its process, and must not wait for a reader of history."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rollplex_coordinator.archive.runs import Archive
from rollplex_coordinator.http.errors import UnavailableError

READERS = 2
ASKING = 24
"""That read or wait for it. Each has one of the 40 threads in which requests are answered: stop needs one too."""
WAIT_S = 10.0


class Past:
    """The archive, for at most READERS requests at once."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self._free = threading.BoundedSemaphore(READERS)
        self._asking = threading.BoundedSemaphore(ASKING)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Waits for its turn.

        Raises:
            UnavailableError: it did not come within WAIT_S, or too many wait already.
        """
        if not self._asking.acquire(blocking=False):
            raise _too_much(f"{ASKING} requests at once")
        try:
            if not self._free.acquire(timeout=WAIT_S):
                raise _too_much(f"{READERS} readers for {WAIT_S:g} s")
            try:
                yield
            finally:
                self._free.release()
        finally:
            self._asking.release()


def _too_much(got: str) -> UnavailableError:
    return UnavailableError(
        "too much of past runs is being read", got=got, needed="a free reader", do="Try again later."
    )
