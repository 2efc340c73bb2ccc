"""The books of one device: what is held, set aside and waited for, and whether more fits. Pure.

Owns the arithmetic and the queue of one device. Knows nothing of other devices, of lease numbers, or of who may release
what (`rollplex_coordinator.decisions.ledger`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollplex.journal.phases import WORKING_PHASES, Phase
from rollplex.protocol.common import Device
from rollplex_coordinator.decisions.leases import (
    DeviceView,
    Lease,
    LeaseRequest,
    Pending,
    Reservation,
    ReservationView,
    alive_bytes,
    alive_in,
    alive_phases,
)


class Account:
    """One device. `held_bytes` and `drawn` are kept as running sums, so that `disagreements` has something to check."""

    def __init__(self, device: Device, budget_bytes: int) -> None:
        self.device = device
        self.budget_bytes = budget_bytes
        self.leases: dict[int, Lease] = {}
        self.queue: list[Pending] = []
        self.reservations: dict[str, Reservation] = {}
        self.held_bytes = 0
        self.drawn: dict[str, int] = {}
        self.peaks: dict[Phase, int] = {}

    # --- arithmetic -----------------------------------------------------------------------------------------------

    def undrawn(self, name: str) -> int:
        """Bytes of a reservation that no lease uses now."""
        return self.reservations[name].size_bytes - self.drawn[name]

    def load(self, phase: Phase, present: Phase) -> int:
        """The most that present leases and reservations can come to in `phase`, now or when it comes. Reservations
        count in full, so the leases drawn from them do not count again."""
        free = (lease for lease in self.leases.values() if lease.reservation is None)
        return alive_bytes(free, phase, present) + self._reserved(phase)

    def _reserved(self, phase: Phase) -> int:
        return sum(r.size_bytes for r in self.reservations.values() if phase in r.phases)

    def missing(self, blocks: Sequence[LeaseRequest], present: Phase) -> int:
        """Bytes by which blocks without reservation do not fit now. Not positive if they do."""
        return max(
            self.load(phase, present) + alive_bytes(blocks, phase, present) - self.budget_bytes
            for phase in alive_phases(blocks, present)
        )

    def missing_for_ever(
        self,
        blocks: Sequence[LeaseRequest],
        present: Phase,
        ahead: Sequence[Pending],
        more: Sequence[Reservation] = (),
    ) -> int:
        """Bytes by which blocks without reservation can never fit: not beside what stays, even if all else goes.

        What stays in a phase are the permanent leases, also those that `ahead` in the queue will become, and the
        reservations in full, together with `more`. Positive if they cannot fit.
        """
        leases = [lease for lease in self.leases.values() if lease.permanent and lease.reservation is None]
        coming = [block for pending in ahead for block in pending.blocks if block.permanent]
        worst = -self.budget_bytes
        for phase in alive_phases(blocks, present):
            reserved = sum(r.size_bytes for r in (*self.reservations.values(), *more) if phase in r.phases)
            stays = alive_bytes(leases, phase, present) + alive_bytes(coming, phase, present) + reserved
            worst = max(worst, stays + alive_bytes(blocks, phase, present) - self.budget_bytes)
        return worst

    # --- changes --------------------------------------------------------------------------------------------------

    def add(self, lease: Lease, present: Phase) -> None:
        self.leases[lease.id] = lease
        self.held_bytes += lease.size_bytes
        if lease.reservation is not None:
            self.drawn[lease.reservation] += lease.size_bytes
        self.note_peak(present)

    def remove(self, lease: Lease) -> None:
        del self.leases[lease.id]
        self.held_bytes -= lease.size_bytes
        if lease.reservation is not None:
            self.drawn[lease.reservation] -= lease.size_bytes

    def note_peak(self, present: Phase) -> None:
        self.peaks[present] = max(self.peaks.get(present, 0), self.held_bytes)

    # --- for others -----------------------------------------------------------------------------------------------

    def disagreements(self, present: Phase) -> Iterator[str]:
        """Every number of these books that does not agree with another."""
        held = sum(lease.size_bytes for lease in self.leases.values())
        if held != self.held_bytes:
            yield f"{self.device}: leases come to {held} bytes, the running sum is {self.held_bytes}"
        if self.held_bytes > self.budget_bytes:
            yield f"{self.device}: {self.held_bytes} bytes are held, the budget is {self.budget_bytes}"
        for name, reservation in self.reservations.items():
            drawn = sum(lease.size_bytes for lease in self.leases.values() if lease.reservation == name)
            if drawn != self.drawn[name]:
                yield f"{self.device}: {name}: leases draw {drawn} bytes, the running sum is {self.drawn[name]}"
            if drawn > reservation.size_bytes:
                yield f"{self.device}: {name}: {drawn} bytes are drawn of {reservation.size_bytes}"
        for lease in self.leases.values():
            if present is not Phase.DRAIN and not alive_in(lease, present, present):
                yield f"{self.device}: lease {lease.id} lives to {lease.last.name}, but this is {present.name}"
        if self.peaks.get(present, 0) < self.held_bytes:
            yield f"{self.device}: peak {self.peaks.get(present, 0)} in {present.name} is below {self.held_bytes}"
        for phase in () if present is Phase.DRAIN else WORKING_PHASES:
            if (load := self.load(phase, present)) > self.budget_bytes:
                yield f"{self.device}: {phase.name} can come to {load} bytes, the budget is {self.budget_bytes}"
        if self.queue and self.missing(self.queue[0].blocks, present) <= 0:
            yield f"{self.device}: request {self.queue[0].request} is first in the queue and fits, but waits"

    def view(self, present: Phase) -> DeviceView:
        """The device as others see it."""
        reserved = sum(self.undrawn(name) for name, r in self.reservations.items() if present in r.phases)
        return DeviceView(
            device=self.device,
            budget_bytes=self.budget_bytes,
            held_bytes=self.held_bytes,
            reserved_bytes=reserved,
            free_bytes=self.budget_bytes - self.held_bytes - reserved,
            peak_bytes={phase.name: peak for phase, peak in sorted(self.peaks.items())},
            reservations=tuple(
                ReservationView(
                    name=name,
                    size_bytes=r.size_bytes,
                    drawn_bytes=self.drawn[name],
                    phases=tuple(phase.name for phase in sorted(r.phases)),
                )
                for name, r in self.reservations.items()
            ),
            leases=tuple(self.leases.values()),
            waiting=tuple(self.queue),
        )
