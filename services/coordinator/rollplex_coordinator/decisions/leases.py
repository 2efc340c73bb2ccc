"""What the ledger speaks of: reservations, requests, leases, and the picture it shows to others. Values only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from msgspec import Struct

from rollplex.errors import BudgetError
from rollplex.journal.phases import WORKING_PHASES, Phase
from rollplex.protocol.common import Device, Kind

MAX_SIZE_BYTES = 2**53
"""Above this a size is a mistake (and not exact in JSON)."""


class Reservation(Struct, frozen=True, kw_only=True):
    """A standing claim: in each of `phases`, leases up to `size_bytes` in all can be drawn from it at once, always."""

    name: str
    device: Device
    size_bytes: int
    phases: frozenset[Phase]


class LeaseRequest(Struct, frozen=True, kw_only=True):
    """One block of memory that somebody needs.

    Lifetime: from the grant, which may come in any phase from `first` to `last`, to the end of phase `last` at the
    latest; or for the whole run if `last` is DRAIN.
    """

    device: Device
    kind: Kind
    size_bytes: int
    producer: str
    """The owner: the process that writes it. When it dies, its leases end."""
    last_consumer: str
    """Who is done with it last, and so may give it back, as the owner may."""
    first: Phase
    last: Phase
    purpose: str
    segment: bool = False
    reservation: str | None = None

    @property
    def permanent(self) -> bool:
        return self.last is Phase.DRAIN


class Lease(Struct, frozen=True, kw_only=True):
    """The right of `producer` to hold so many bytes, until `last_consumer` is done or the phase `last` ends."""

    id: int
    device: Device
    kind: Kind
    size_bytes: int
    producer: str
    last_consumer: str
    first: Phase
    """The phase in which it was granted."""
    last: Phase
    purpose: str
    segment: bool
    reservation: str | None

    @property
    def permanent(self) -> bool:
        return self.last is Phase.DRAIN


class Pending(Struct, frozen=True, kw_only=True):
    """A request in the queue. Its blocks are granted all together or not at all: whoever held one half and waited for
    the other could wait for ever."""

    request: int
    blocks: tuple[LeaseRequest, ...]

    @property
    def device(self) -> Device:
        return self.blocks[0].device

    @property
    def producer(self) -> str:
        return self.blocks[0].producer


class Granted(Struct, frozen=True, kw_only=True):
    """The leases of a request, in the order of its blocks."""

    request: int
    leases: tuple[Lease, ...]

    @property
    def lease(self) -> int:
        """Id of the (first) lease."""
        return self.leases[0].id


class Waiting(Struct, frozen=True, kw_only=True):
    """The request is in the queue; a later release, phase or death grants it."""

    request: int
    ahead: int
    """Requests that come before it."""
    missing_bytes: int
    """What must come back before it fits, if it were the first."""


Answer: TypeAlias = Granted | Waiting


class Dropped(Struct, frozen=True, kw_only=True):
    """What ended with a process, and what was granted because of it."""

    requests: tuple[Pending, ...]
    granted: tuple[Granted, ...]


class ReservationView(Struct, frozen=True, kw_only=True):
    """One reservation now."""

    name: str
    size_bytes: int
    drawn_bytes: int
    phases: tuple[str, ...]


class DeviceView(Struct, frozen=True, kw_only=True):
    """One device now."""

    device: Device
    budget_bytes: int
    held_bytes: int
    reserved_bytes: int
    """Set aside in this phase and not drawn."""
    free_bytes: int
    """Of the budget neither held nor set aside in this phase."""
    peak_bytes: dict[str, int]
    """Most that was held at once, by the name of the phase."""
    reservations: tuple[ReservationView, ...]
    leases: tuple[Lease, ...]
    waiting: tuple[Pending, ...]


class LedgerView(Struct, frozen=True, kw_only=True):
    """The whole ledger now."""

    phase: str
    devices: tuple[DeviceView, ...]


def alive_in(item: LeaseRequest | Lease, phase: Phase, present: Phase) -> bool:
    """Whether memory that is held in `present` may still be held in `phase`, of this round or (if permanent) of a
    later one."""
    return item.permanent or present <= phase <= item.last


def alive_bytes(items: Iterable[LeaseRequest] | Iterable[Lease], phase: Phase, present: Phase) -> int:
    """Sum of the sizes for which `alive_in` holds."""
    return sum(item.size_bytes for item in items if alive_in(item, phase, present))


def alive_phases(items: Sequence[LeaseRequest] | Sequence[Lease], present: Phase) -> list[Phase]:
    """The working phases in which any of the items may be held."""
    return [phase for phase in WORKING_PHASES if any(alive_in(item, phase, present) for item in items)]


def check_size(size_bytes: object, what: str) -> None:
    """Whether a number may enter the ledger as a size.

    Raises:
        BudgetError: not an int, negative, or beyond 2**53.
    """
    if type(size_bytes) is not int or not 0 <= size_bytes <= MAX_SIZE_BYTES:
        raise BudgetError(
            "Size is not a number of bytes",
            got=repr(size_bytes),
            needed=f"an int from 0 to {MAX_SIZE_BYTES}",
            where=what,
        )


def problem_with(blocks: Sequence[LeaseRequest], phase: Phase) -> tuple[str, str] | None:
    """What is wrong with blocks that are to be one request in `phase`: what it got and what it needed.

    Raises:
        BudgetError: a size that is not a number of bytes.
    """
    first = blocks[0]
    for block in blocks:
        check_size(block.size_bytes, block.purpose)
        if (block.device, block.producer, block.reservation) != (first.device, first.producer, first.reservation):
            return f"{block.purpose} with {first.purpose}", "one device, owner and reservation per request"
        if not block.first <= phase <= block.last:
            lifetime = f"{block.purpose} from {block.first.name} to {block.last.name}"
            return lifetime, f"a lifetime with {phase.name} in it"
    return None
