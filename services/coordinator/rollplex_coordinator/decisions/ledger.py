"""The ledger: who may hold how much of which device, until when. A pure state machine.

    request ──fits, or has a reservation──► lease ──release, or death of its owner──► gone
        └───does not fit now──► queue ──release, death, later phase──► lease

A *reservation* is a standing claim for private blocks that the work cannot go on without: the rollout's KV pool in
ROLLOUT, the trainer's workspace in TRAIN. A request that names one is granted at once, always. A request without one (a
prefix unit, the inputs of a step) is granted if in every phase in which it may be held, of this round and for permanent
ones of all later rounds,

    leases without reservation that may be held then + reservations of that phase + its own size  <=  budget

so that what never lives at the same time (a KV pool and a workspace) is counted in turn. Otherwise it waits, strictly
first come first served on its device. A request that could not fit even beside nothing but what stays (permanent
leases, reservations in full) is refused at once with the table of who holds what.

Why the sum never exceeds the budget (I3). Let C(q) be the left side for phase q, without a new size. Grants without
reservation keep C(q) <= budget by the rule; grants with reservation leave it as it is; entering a later phase takes
phases away. Beginning a new round is refused while anything of the old one is held, so only permanent leases remain,
and those were counted in every phase. What is held now is at most C(now), because a lease lives only in phases of its
reservation, and leases never draw more than it has.

Why nobody waits for ever. A request with a reservation never waits, so a lease that is held can always be worked on to
its end, as long as its worker needs no request that waits: that is the caller's part (`schedule` asks for a unit's
memory as one request, and a unit needs no other's). So every lease of a round comes back; then the first in the queue
fits, because it was refused if it could not, later requests do not pass it, and `reserve` refuses what would break
this. By induction so does the next.

Owns decisions and numbers. Knows nothing of segments, sockets, clocks, or what is really allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from rollplex.errors import BudgetError, StateError
from rollplex.journal.phases import Phase
from rollplex.protocol.common import Device
from rollplex_coordinator.decisions.account import Account
from rollplex_coordinator.decisions.leases import (
    Answer,
    Dropped,
    Granted,
    Lease,
    LeaseRequest,
    LedgerView,
    Pending,
    Reservation,
    Waiting,
    alive_in,
    alive_phases,
    check_size,
    problem_with,
)
from rollplex_coordinator.decisions.ledger_table import table

__all__ = [
    "Answer",
    "Dropped",
    "Granted",
    "Lease",
    "LeaseRequest",
    "Ledger",
    "LedgerView",
    "Pending",
    "Reservation",
    "Waiting",
]


class Ledger:
    """All devices of the run. Every method checks first and changes afterwards: if it raises, nothing has changed.

    Args:
        budgets: bytes that may be held on each device.

    Raises:
        BudgetError: a budget that is not a number of bytes.
    """

    def __init__(self, budgets: Mapping[Device, int]) -> None:
        for device, budget in budgets.items():
            check_size(budget, f"budget of device {device}")
        self._accounts = {device: Account(device, budget) for device, budget in sorted(budgets.items())}
        self._where: dict[int, Device] = {}
        self._next_lease = 1
        self._next_request = 1
        self._phase = Phase.IDLE

    @property
    def phase(self) -> Phase:
        return self._phase

    # --- events ---------------------------------------------------------------------------------------------------

    def reserve(self, reservation: Reservation) -> None:
        """Set memory aside for good.

        Raises:
            BudgetError: a bad size; or it does not fit beside what is held and set aside, or a request that waits could
                then never be granted. Shows the table.
            StateError: the name is taken on that device, there are no phases, or one of them is DRAIN.
        """
        account = self._account(reservation.device, reservation.name)
        check_size(reservation.size_bytes, reservation.name)
        self._expect(
            reservation.name not in account.reservations, f"reservation {reservation.name}", "a name that is not taken"
        )
        self._expect(
            bool(reservation.phases) and Phase.DRAIN not in reservation.phases,
            f"reservation {reservation.name} for {sorted(phase.name for phase in reservation.phases)}",
            "at least one phase, and not DRAIN",
        )
        over = max(account.load(phase, self._phase) for phase in reservation.phases) - account.budget_bytes
        self._afford(over + reservation.size_bytes, f"Reservation {reservation.name}", reservation.size_bytes, account)
        for place, pending in enumerate(account.queue):
            over = account.missing_for_ever(pending.blocks, self._phase, account.queue[:place], (reservation,))
            what = f"Reservation {reservation.name} beside request {pending.request}, which waits,"
            self._afford(over, what, reservation.size_bytes, account)
        account.reservations[reservation.name] = reservation
        account.drawn[reservation.name] = 0

    def cover(self, phases: Mapping[str, frozenset[Phase]]) -> tuple[Granted, ...]:
        """Reservations are for other phases from now on; what that leaves room for is granted.

        Args:
            phases: by the name of a reservation, on whichever devices there is one.

        Raises:
            BudgetError, StateError: as `reserve`; or there is no such reservation, or something is drawn from one.
        """
        known = {name: [a for a in self._accounts.values() if name in a.reservations] for name in phases}
        for name, accounts in known.items():
            self._expect(bool(accounts), f"other phases for {name}", "the name of a reservation")
            self._expect(
                not any(account.drawn[name] for account in accounts),
                f"other phases for {name}",
                "nothing drawn from it",
            )
        before = [(account, dict(account.reservations)) for account in self._accounts.values()]
        try:
            for account, old in before:
                for name in old.keys() & phases.keys():  # all are taken back before one is widened
                    del account.reservations[name]
                for name in (name for name in old if name in phases):
                    self.reserve(replace(old[name], phases=phases[name]))
        except (BudgetError, StateError):
            for account, old in before:
                account.reservations = old
            raise
        return tuple(granted for account in self._accounts.values() for granted in self._serve(account))

    def request(self, *blocks: LeaseRequest) -> Answer:
        """Ask for one block, or for several of one device that are granted together or not at all.

        Raises:
            BudgetError: a bad size, more than is left of the reservation, or what can never fit. Shows the table.
            StateError: no block, blocks of several devices, owners or reservations, a lifetime that the present phase
                is not in or that the reservation does not cover, an unknown reservation, or the run is ending.
        """
        account = self._check_request(blocks)
        size = sum(block.size_bytes for block in blocks)
        what = " + ".join(block.purpose for block in blocks)
        reservation = blocks[0].reservation
        if reservation is not None:
            self._afford(size - account.undrawn(reservation), f"{what} from {reservation}", size, account)
            return self._grant(account, self._number(blocks))
        self._afford(account.missing_for_ever(blocks, self._phase, account.queue), what, size, account)
        missing = account.missing(blocks, self._phase)
        if not account.queue and missing <= 0:
            return self._grant(account, self._number(blocks))
        pending = self._number(blocks)
        account.queue.append(pending)
        return Waiting(request=pending.request, ahead=len(account.queue) - 1, missing_bytes=max(0, missing))

    def release(self, lease_id: int, by: str) -> tuple[Granted, ...]:
        """A lease ends; what fits now is granted, in the order of the queue.

        Args:
            by: its producer or its last consumer.

        Raises:
            StateError: no such lease, released before, or not `by`'s to release.
        """
        event = f"release of lease {lease_id} by {by}"
        device = self._where.get(lease_id)
        before = 0 < lease_id < self._next_lease
        self._expect(device is not None, event, "a lease that was not released before" if before else "a lease")
        account = self._accounts[self._where[lease_id]]
        lease = account.leases[lease_id]
        self._expect(
            by in {lease.producer, lease.last_consumer}, event, f"{lease.producer} or {lease.last_consumer} to do it"
        )
        self._remove(account, lease)
        return tuple(self._serve(account))

    def enter(self, phase: Phase) -> tuple[Granted, ...]:
        """The run enters a phase. What was kept free for phases that are over can be granted.

        On entering DRAIN the queues are emptied: nothing new starts.

        Raises:
            StateError: a lease, or a request that waits, does not live in the new phase; or the run was ending.
        """
        ended = self._phase is Phase.DRAIN and phase is not Phase.DRAIN
        self._expect(not ended, f"phase {phase.name}", "no phase after DRAIN")
        if phase is Phase.DRAIN:
            for account in self._accounts.values():
                account.queue.clear()
        else:
            stale = list(self._stale(phase))
            self._expect(not stale, f"phase {phase.name}", f"the end of {'; '.join(stale)}")
        self._phase = phase
        for account in self._accounts.values():
            account.note_peak(phase)
        return tuple(granted for account in self._accounts.values() for granted in self._serve(account))

    def withdraw(self, owner: str) -> Dropped:
        """A process is dead: its requests end. What it leased is given back one by one. An owner that is not known has
        none."""
        requests: list[Pending] = []
        for account in self._accounts.values():
            requests += [pending for pending in account.queue if pending.producer == owner]
            account.queue = [pending for pending in account.queue if pending.producer != owner]
        granted = [granted for account in self._accounts.values() for granted in self._serve(account)]
        return Dropped(requests=tuple(requests), granted=tuple(granted))

    # --- questions ------------------------------------------------------------------------------------------------

    def free_bytes(self, device: Device) -> int:
        """Bytes of a device's budget that are neither held nor set aside in this phase.

        Raises:
            StateError: no such device.
        """
        return self._account(device, "free_bytes").view(self._phase).free_bytes

    def snapshot(self) -> LedgerView:
        """Everything, for status and journal."""
        return LedgerView(
            phase=self._phase.name, devices=tuple(account.view(self._phase) for account in self._accounts.values())
        )

    def table(self) -> str:
        """Who holds what, as text."""
        return table(self.snapshot())

    def check_integrity(self) -> None:
        """Whether the books agree with themselves and with the rule.

        Raises:
            StateError: they do not; names every number that disagrees.
        """
        wrong = [text for account in self._accounts.values() for text in account.disagreements(self._phase)]
        here = {id_: device for device, account in self._accounts.items() for id_ in account.leases}
        if here != self._where:
            wrong.append(f"leases by device are {here}, by number {self._where}")
        if wrong:
            raise StateError("The ledger's numbers disagree", got="; ".join(wrong), needed="none that do")

    # --- steps ----------------------------------------------------------------------------------------------------

    def _account(self, device: Device, what: str) -> Account:
        self._expect(device in self._accounts, f"{what} on device {device}", "a device with a budget")
        return self._accounts[device]

    def _check_request(self, blocks: tuple[LeaseRequest, ...]) -> Account:
        self._expect(bool(blocks), "request without a block", "at least one")
        self._expect(self._phase is not Phase.DRAIN, f"request for {blocks[0].purpose}", "a run that is not ending")
        first = blocks[0]
        account = self._account(first.device, first.purpose)
        if (problem := problem_with(blocks, self._phase)) is not None:
            self._expect(False, *problem)
        if first.reservation is not None:
            self._check_covered(account, first.reservation, blocks)
        return account

    def _check_covered(self, account: Account, name: str, blocks: tuple[LeaseRequest, ...]) -> None:
        self._expect(name in account.reservations, f"reservation {name}", f"one of {[*account.reservations]}")
        missing = set(alive_phases(blocks, self._phase)) - account.reservations[name].phases
        text = ", ".join(phase.name for phase in sorted(missing))
        self._expect(not missing, f"{blocks[0].purpose} from {name}", f"a reservation that covers {text}")

    def _number(self, blocks: tuple[LeaseRequest, ...]) -> Pending:
        pending = Pending(request=self._next_request, blocks=blocks)
        self._next_request += 1
        return pending

    def _grant(self, account: Account, pending: Pending) -> Granted:
        leases = []
        for block in pending.blocks:
            lease = Lease(
                id=self._next_lease,
                device=block.device,
                kind=block.kind,
                size_bytes=block.size_bytes,
                producer=block.producer,
                last_consumer=block.last_consumer,
                first=self._phase,
                last=block.last,
                purpose=block.purpose,
                segment=block.segment,
                reservation=block.reservation,
            )
            self._next_lease += 1
            self._where[lease.id] = account.device
            account.add(lease, self._phase)
            leases.append(lease)
        return Granted(request=pending.request, leases=tuple(leases))

    def _remove(self, account: Account, lease: Lease) -> None:
        account.remove(lease)
        del self._where[lease.id]

    def _serve(self, account: Account) -> Iterator[Granted]:
        while account.queue and account.missing(account.queue[0].blocks, self._phase) <= 0:
            yield self._grant(account, account.queue.pop(0))

    def _stale(self, phase: Phase) -> Iterator[str]:
        """What cannot go on into `phase`. Into a lower one, a new round, only what is permanent can."""
        for account in self._accounts.values():
            for lease in account.leases.values():
                if not lease.permanent and not alive_in(lease, phase, self._phase):
                    yield f"lease {lease.id} of {lease.producer} ({lease.purpose}, to {lease.last.name})"
            for pending in account.queue:
                for block in pending.blocks:
                    if not block.permanent and not alive_in(block, phase, self._phase):
                        yield f"request {pending.request} of {block.producer} ({block.purpose}, to {block.last.name})"

    def _afford(self, over: int, what: str, size: int, account: Account) -> None:
        if over > 0:
            raise BudgetError(
                f"{what} cannot fit",
                got=f"{size} bytes asked for, {over} too many",
                needed=f"at most {max(0, size - over)} bytes beside what stays",
                do="Raise the device's memory budget, or lower what is asked for.\n" + self.table(),
                where=f"device {account.device}, phase {self._phase.name}",
            )

    def _expect(self, allowed: bool, event: str, needed: str) -> None:
        if not allowed:
            raise StateError(
                "The ledger does not allow this", got=event, needed=needed, where=f"ledger, phase {self._phase.name}"
            )
