"""How many bytes are leased, by device and kind, as the journal tells it."""

from __future__ import annotations

from rollplex.journal.events import LeaseGranted, LeaseReleased
from rollplex.trace.marks import Sample


class Leased:
    """Running sums. A journal that begins in the middle of a run may release what it never granted: never below 0."""

    def __init__(self) -> None:
        self._bytes: dict[tuple[str, str], int] = {}

    def tell(self, event: LeaseGranted | LeaseReleased, at_ns: int) -> Sample:
        """The sum after this event."""
        key = (str(event.device), event.kind.value)
        change = event.size_bytes if isinstance(event, LeaseGranted) else -event.size_bytes
        self._bytes[key] = max(0, self._bytes.get(key, 0) + change)
        return self._sample(key, at_ns)

    def now(self, at_ns: int) -> list[Sample]:
        """Every sum."""
        return [self._sample(key, at_ns) for key in self._bytes]

    def drop(self, at_ns: int) -> list[Sample]:
        """The process that granted all of it is gone."""
        self._bytes = dict.fromkeys(self._bytes, 0)
        return self.now(at_ns)

    def _sample(self, key: tuple[str, str], at_ns: int) -> Sample:
        return Sample(device=key[0], kind=key[1], at_ns=at_ns, size_bytes=self._bytes[key])
