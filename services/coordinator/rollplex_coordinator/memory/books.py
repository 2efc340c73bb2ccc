"""What the processes of one device hold by the books, as the driver's numbers are compared with it (`observer`).

Owns: how long freed private memory still counts, since an allocator keeps it until it is trimmed. Does not know leases.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollplex_coordinator.decisions.observed import Leased


class Books:
    """Of one device."""

    def __init__(self) -> None:
        self.leased = Leased()
        """As the books stand: replaced, never changed, so that another thread may read it. Private memory is what an
        owner's allocator may hold: as much as it was leased at once since it was last trimmed."""
        self._kept: dict[str, int] = {}
        self._trimmed: dict[str, int] = {}
        self._worked: set[str] = set()
        self._held_in_phase: dict[str, int] = {}

    def count(self, segments_bytes: int, private: Mapping[str, int], scratch: Mapping[str, int]) -> None:
        """Something was leased or given back.

        Args:
            private: leased now, by owner.
            scratch: what an owner works with beside its leases, in a phase in which it has had any.
        """
        for owner, size_bytes in private.items():
            self._kept[owner] = max(size_bytes, self._kept.get(owner, 0))
            if size_bytes > self._trimmed.get(owner, 0):
                self._worked.add(owner)
        sizes = {
            owner: size_bytes + (scratch.get(owner, 0) if owner in self._worked else 0)
            for owner, size_bytes in sorted(self._kept.items())
        }
        self.leased = Leased(
            segments_bytes=segments_bytes, private=tuple((o, size) for o, size in sizes.items() if size)
        )

    def trim(self, owner: str, private_bytes: int) -> None:
        """An owner's allocator has given back what was freed; `count` follows. private_bytes: leased to it now."""
        self._trimmed[owner] = self._kept[owner] = private_bytes
        self._worked.discard(owner)

    def enter(self) -> None:
        """Another phase begins, in which nobody has worked yet; `count` follows. Of what an owner worked with its
        allocator keeps little: the next unit's leases lie in the same memory."""
        self._worked.clear()

    def note_held(self, owner: str, size_bytes: int) -> None:
        """What an owner really held under its private leases."""
        self._held_in_phase[owner] = max(size_bytes, self._held_in_phase.get(owner, 0))

    def take_held(self) -> dict[str, int]:
        """The most that each owner held since this was last asked."""
        held, self._held_in_phase = self._held_in_phase, {}
        return held
