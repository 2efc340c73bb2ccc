"""Leases with something behind them: the ledger's decisions, the holder's segments, the journal's record of both.

Processes that work together hold the same block each on its own device, under a lease of its own (`Blocks`). They are
asked for at once, and the ledger serves each device in the order of requests: whoever waits longest waits for nobody
but those who hold theirs on every device, and who give them back.

Owns the blocks of the node. Does not decide what fits (ledger) nor when a block is needed (step, feed, loading).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from rollplex.errors import BudgetError, StateError
from rollplex.journal.events import LeaseGranted, LeaseReleased, LeaseWaiting
from rollplex.journal.phases import Phase
from rollplex.memory.placement import taken_bytes
from rollplex.protocol.common import Device, Held
from rollplex.protocol.common import Memory as MemoryKind
from rollplex_coordinator.decisions.ledger import Granted, LeaseRequest, Ledger, LedgerView
from rollplex_coordinator.decisions.observed import Leased
from rollplex_coordinator.memory.blocks import Block, Blocks, Want
from rollplex_coordinator.memory.books import Books
from rollplex_coordinator.memory.holder import Holder
from rollplex_coordinator.memory.observers import Observers
from rollplex_coordinator.records.record import Record

__all__ = ("Block", "Blocks", "Memory", "Want")


class Memory:
    """All blocks of one node.

    Args:
        device: what the workers compute on; of several, the first.
        host: what lies in host memory whatever the workers compute on, where it has a budget of its own: beside a GPU,
            and beside several devices. None: `device` is the host, and everything lies there.
        kind: of the devices' memory; with `host` a GPU's unless given.
    """

    def __init__(
        self,
        ledger: Ledger,
        holder: Holder,
        record: Record,
        device: Device,
        host: Device | None = None,
        *,
        kind: MemoryKind | None = None,
    ) -> None:
        self._ledger = ledger
        self._holder = holder
        self._record = record
        self._device = device
        self._host = host
        self._kind = kind or (MemoryKind.HOST if host is None else MemoryKind.CUDA)
        self._blocks: dict[int, Block] = {}
        self._waiting: dict[int, _Part] = {}
        self._held: dict[int, int] = {}
        self._since: dict[int, float] = {}
        self._books: dict[Device, Books] = {}
        self.observers: Observers | None = None
        """Of the GPUs; None on host memory."""
        self.scratch: dict[str, int] = {}
        """What an owner works with beside its leases, in a phase in which it has any: reserved, never leased."""

    def leased(self, device: Device | None = None) -> Leased:
        """The books of a device, the first one unless given, as they stand; another thread may read them."""
        books = self._books.get(device or self._device)
        return Leased() if books is None else books.leased

    def now(self, want: Want, devices: Sequence[Device] | None = None) -> Blocks:
        """A block on each device that must fit at this moment.

        Args:
            devices: those of the processes that it is for; the first one unless given.

        Raises:
            BudgetError: it does not.
        """
        want = self._sized(want)
        found: list[Block] = []
        for device in devices or (self._device,):
            answer = self._ledger.request(self._request(want, device))
            if not isinstance(answer, Granted):
                raise BudgetError(
                    f"no memory for {want.purpose}",
                    got=f"{want.size_bytes} bytes asked for",
                    needed="a block that its reservation covers",
                    do="This is an error of Rollplex: a reservation was planned too small.\n" + self._ledger.table(),
                    where=f"device {device}",
                )
            found += self._grant(answer, (want,), device)
        return Blocks(blocks=tuple(found))

    def cover(self, phases: Mapping[str, frozenset[Phase]]) -> None:
        """Reservations are for other phases from now on (`Ledger.cover`), and serve who waits."""
        self._serve(self._ledger.cover(phases))

    def when_free(
        self,
        wants: tuple[Want, ...],
        then: Callable[[tuple[Blocks, ...]], None],
        devices: Sequence[Device] | None = None,
    ) -> None:
        """Blocks as soon as they fit, all together, first come first served; `then` is called at once if they fit now.

        Args:
            devices: as `now` takes them. What fits on one is held there while it is awaited on others.

        Raises:
            BudgetError: they can never fit.
        """
        wants = tuple(self._sized(want) for want in wants)
        places = tuple(devices or (self._device,))
        request = _Awaited(wants=wants, then=then, num_devices=len(places))
        for rank, device in enumerate(places):
            answer = self._ledger.request(*(self._request(want, device) for want in wants))
            if isinstance(answer, Granted):
                request.granted(rank, self._grant(answer, wants, device))
                continue
            self._waiting[answer.request] = _Part(request=request, rank=rank, device=device)
            for want in wants:
                self._note_waiting(want, device)

    def _note_waiting(self, want: Want, device: Device) -> None:
        place = self._place(want, device)
        self._record.append(
            LeaseWaiting(
                kind=want.kind,
                owner=want.owner,
                device=place,
                size_bytes=want.size_bytes,
                free_bytes=max(0, self._ledger.free_bytes(place)),
                step=self._record.step,
            )
        )

    def release(self, blocks: Blocks | Block) -> None:
        """The last consumer is done: give the blocks back, and serve who waits."""
        for block in blocks.blocks if isinstance(blocks, Blocks) else (blocks,):
            self._release(block)

    def lose(self, owners: Collection[str]) -> None:
        """Processes are dead: what they asked for is not wanted any more, and what they held comes back, but what
        stands from LOAD to the end."""
        for owner in owners:
            dropped = self._ledger.withdraw(owner)
            for request in dropped.requests:
                del self._waiting[request.request]
            self._serve(dropped.granted)
        for block in [b for b in self._blocks.values() if b.want.owner in owners and not b.want.standing]:
            self._release(block)
        for owner in owners:
            self.trimmed(owner)

    def _release(self, block: Block) -> None:
        if block.segment is not None:
            self._holder.close(block.segment.segment)
        del self._blocks[block.lease], self._since[block.lease]
        self._count_leased(block.device)
        granted = self._ledger.release(block.lease, block.want.owner)
        self._record.append(
            LeaseReleased(
                lease=block.lease,
                kind=block.want.kind,
                owner=block.want.owner,
                device=self._place(block.want, block.device),
                size_bytes=block.want.size_bytes,
                held_bytes=self._held.pop(block.lease, None),
                step=self._record.step,
            )
        )
        self._serve(granted)

    def enter(self, phase: Phase) -> None:
        """The node enters a phase; what was kept free for an earlier one can be given out.

        Raises:
            StateError: a segment does not have the size of its lease.
        """
        if self.observers is not None:
            self.observers.enter(phase, self._record.step, lambda device: self._books_of(device).take_held())
        for device, books in self._books.items():
            books.enter()
            self._count_leased(device)
        wrong = {lease: sizes for lease, sizes in self.audit().items() if sizes[0] != sizes[1]}
        if wrong:
            raise StateError(
                "segments and leases disagree", got=str(wrong), needed="lease: (leased bytes, the same held bytes)"
            )
        self._serve(self._ledger.enter(phase))

    def measured(self, held: tuple[Held, ...]) -> None:
        """What a worker really held under its private leases."""
        for item in held:
            self._held[item.lease] = max(item.size_bytes, self._held.get(item.lease, 0))
        for device, owner in {(b.device, b.want.owner) for b in self._blocks.values() if b.lease in self._held}:
            ours = (
                self._held.get(lease, 0)
                for lease, block in self._blocks.items()
                if (block.device, block.want.owner) == (device, owner)
            )
            self._books_of(device).note_held(owner, sum(ours))

    def trimmed(self, owner: str, devices: Sequence[Device] | None = None) -> None:
        """A worker's allocator has given back what was freed: it holds what is leased to it now.

        Args:
            devices: of the workers that have; all unless given.
        """
        for device in devices or list(self._books):
            self._books_of(device).trim(owner, self._private(device).get(owner, 0))
            self._count_leased(device)

    def audit(self) -> dict[int, tuple[int, int]]:
        """Per lease with a segment: leased bytes, and the bytes that the segment has (`Holder.measured`)."""
        sizes = self._holder.measured()
        return {
            lease: (block.want.size_bytes, sizes.get(lease, 0))
            for lease, block in self._blocks.items()
            if block.segment is not None
        }

    def held_bytes(self, lease: int) -> int | None:
        """What the worker measured last under a private lease; None where it has not."""
        return self._held.get(lease)

    def segment_of(self, lease: int) -> int | None:
        """The segment behind a lease; None for private memory."""
        block = self._blocks.get(lease)
        return block.segment.segment if block is not None and block.segment is not None else None

    def age_s(self, lease: int) -> float:
        """Since the grant."""
        return time.monotonic() - self._since.get(lease, time.monotonic())

    def view(self) -> LedgerView:
        """The ledger as it stands."""
        return self._ledger.snapshot()

    def _serve(self, granted: tuple[Granted, ...]) -> None:
        for grant in granted:
            part = self._waiting.pop(grant.request)
            part.request.granted(part.rank, self._grant(grant, part.request.wants, part.device))

    def _place(self, want: Want, device: Device) -> Device:
        return self._host if want.on_host and self._host is not None else device

    def _memory(self, want: Want) -> MemoryKind:
        return MemoryKind.HOST if want.on_host else self._kind

    def _sized(self, want: Want) -> Want:
        """With what it takes instead of what is needed: the ledger counts whole granules of a GPU."""
        if not want.segment:
            return want
        return replace(want, size_bytes=taken_bytes(want.size_bytes, self._memory(want)))

    def _request(self, want: Want, device: Device) -> LeaseRequest:
        return LeaseRequest(
            device=self._place(want, device),
            kind=want.kind,
            size_bytes=want.size_bytes,
            producer=want.owner,
            last_consumer=want.last_consumer,
            first=want.first,
            last=want.last,
            purpose=want.purpose,
            segment=want.segment,
            reservation=want.reservation,
        )

    def _grant(self, granted: Granted, wants: tuple[Want, ...], device: Device) -> tuple[Block, ...]:
        return tuple(self._make(lease.id, want, device) for lease, want in zip(granted.leases, wants, strict=True))

    def _make(self, lease: int, want: Want, device: Device) -> Block:
        segment = None
        if want.segment:
            segment = self._holder.create(want.kind, want.size_bytes, lease, self._memory(want), device)
        block = Block(lease=lease, want=want, segment=segment, device=device)
        self._blocks[lease] = block
        self._count_leased(device)
        self._since[lease] = time.monotonic()
        self._record.append(
            LeaseGranted(
                lease=lease,
                kind=want.kind,
                owner=want.owner,
                device=self._place(want, device),
                size_bytes=want.size_bytes,
                last_consumer=want.last_consumer,
                segment=segment.segment if segment else None,
                step=self._record.step,
            )
        )
        return block

    def _count_leased(self, device: Device) -> None:
        segments = sum(block.want.size_bytes for block in self._on(device) if block.segment is not None)
        self._books_of(device).count(segments, self._private(device), self.scratch)

    def _books_of(self, device: Device) -> Books:
        return self._books.setdefault(device, Books())

    def _on(self, device: Device) -> list[Block]:
        ours = [block for block in self._blocks.values() if block.device == device]
        return [block for block in ours if not (block.want.on_host and self._host is not None)]

    def _private(self, device: Device) -> dict[str, int]:
        """Private memory that is leased on a device now, by owner."""
        private: dict[str, int] = {}
        for block in self._on(device):
            if block.segment is None:
                private[block.want.owner] = private.get(block.want.owner, 0) + block.want.size_bytes
        return private


class _Awaited:
    """Blocks on several devices, of which some are there."""

    def __init__(
        self, *, wants: tuple[Want, ...], then: Callable[[tuple[Blocks, ...]], None], num_devices: int
    ) -> None:
        self.wants = wants
        self._then = then
        self._num_devices = num_devices
        self._found: dict[int, tuple[Block, ...]] = {}

    def granted(self, rank: int, blocks: tuple[Block, ...]) -> None:
        """One block for each want, on the device of a rank."""
        self._found[rank] = blocks
        if len(self._found) == self._num_devices:
            by_rank = [self._found[rank] for rank in range(self._num_devices)]
            self._then(tuple(Blocks(blocks=of_want) for of_want in zip(*by_rank, strict=True)))


class _Part(Struct, frozen=True, kw_only=True):
    """Of a request: what waits on one device."""

    request: _Awaited
    rank: int
    device: Device
