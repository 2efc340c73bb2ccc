"""Leases with something behind them: the ledger's decisions, the holder's segments, the journal's record of both.

Owns the blocks of the node. Does not decide what fits (ledger) nor when a block is needed (step, feed, loading).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from rollplex.errors import BudgetError, StateError
from rollplex.journal.events import LeaseGranted, LeaseReleased, LeaseWaiting
from rollplex.journal.phases import Phase
from rollplex.memory.placement import taken_bytes
from rollplex.protocol.common import Device, Held, Kind, LeaseRef, SegmentRef
from rollplex.protocol.common import Memory as MemoryKind
from rollplex_coordinator.decisions.ledger import Granted, LeaseRequest, Ledger, LedgerView
from rollplex_coordinator.decisions.observed import Leased
from rollplex_coordinator.memory.holder import Holder
from rollplex_coordinator.memory.observer import Observer
from rollplex_coordinator.records.record import Record


class Want(Struct, frozen=True, kw_only=True):
    """A block that somebody needs. `reservation`: the standing claim that it is taken from. `on_host`: it lies in host
    memory even where the workers compute on a GPU."""

    kind: Kind
    size_bytes: int
    owner: str
    last_consumer: str
    first: Phase
    last: Phase
    purpose: str
    segment: bool = False
    reservation: str | None = None
    on_host: bool = False


class Block(Struct, frozen=True, kw_only=True):
    """A granted block. `segment` is None for private memory."""

    lease: int
    want: Want
    segment: SegmentRef | None

    @property
    def private(self) -> LeaseRef:
        """The grant as a worker sees it."""
        return LeaseRef(lease=self.lease, kind=self.want.kind, size_bytes=self.want.size_bytes)

    @property
    def ref(self) -> SegmentRef:
        """The segment.

        Raises:
            AssertionError: the block is private.
        """
        assert self.segment is not None, f"{self.want.purpose} is private memory"
        return self.segment


class Memory:
    """All blocks of one node.

    Args:
        device: what the workers compute on.
        host: the host's memory, where that is a GPU; None: `device` is the host, and everything lies there.
    """

    def __init__(
        self, ledger: Ledger, holder: Holder, record: Record, device: Device, host: Device | None = None
    ) -> None:
        self._ledger = ledger
        self._holder = holder
        self._record = record
        self._device = device
        self._host = host
        self._blocks: dict[int, Block] = {}
        self._waiting: dict[int, tuple[tuple[Want, ...], Callable[[tuple[Block, ...]], None]]] = {}
        self._held: dict[int, int] = {}
        self._since: dict[int, float] = {}
        self._held_in_phase: dict[str, int] = {}
        self.observer: Observer | None = None
        """Of the GPU; None on host memory."""
        self.leased = Leased()
        """The books of the device as they stand: replaced, never changed, so that another thread may read it. Private
        memory is what an owner's allocator may hold: as much as it was leased at once since it was last trimmed."""
        self.scratch: dict[str, int] = {}
        """What an owner works with beside its leases, while it has had any: reserved, and never leased."""
        self._kept: dict[str, int] = {}
        self._trimmed: dict[str, int] = {}

    def now(self, want: Want) -> Block:
        """A block that must fit at this moment.

        Raises:
            BudgetError: it does not.
        """
        want = self._sized(want)
        answer = self._ledger.request(self._request(want))
        if isinstance(answer, Granted):
            return self._grant(answer, (want,))[0]
        raise BudgetError(
            f"no memory for {want.purpose}",
            got=f"{want.size_bytes} bytes asked for",
            needed="a block that its reservation covers",
            do="This is an error of Rollplex: a reservation was planned too small.\n" + self._ledger.table(),
        )

    def when_free(self, wants: tuple[Want, ...], then: Callable[[tuple[Block, ...]], None]) -> None:
        """Blocks as soon as they fit, all together, first come first served; `then` is called at once if they fit now.

        Raises:
            BudgetError: they can never fit.
        """
        wants = tuple(self._sized(want) for want in wants)
        answer = self._ledger.request(*(self._request(want) for want in wants))
        if isinstance(answer, Granted):
            then(self._grant(answer, wants))
            return
        self._waiting[answer.request] = (wants, then)
        for want in wants:
            self._record.append(
                LeaseWaiting(
                    kind=want.kind,
                    owner=want.owner,
                    device=self._place(want),
                    size_bytes=want.size_bytes,
                    free_bytes=max(0, self._ledger.free_bytes(self._place(want))),
                    step=self._record.step,
                )
            )

    def release(self, block: Block) -> None:
        """The block's last consumer is done: give it back, and serve who waits."""
        if block.segment is not None:
            self._holder.close(block.segment.segment)
        del self._blocks[block.lease], self._since[block.lease]
        self._count_leased()
        granted = self._ledger.release(block.lease, block.want.owner)
        self._record.append(
            LeaseReleased(
                lease=block.lease,
                kind=block.want.kind,
                owner=block.want.owner,
                device=self._place(block.want),
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
        if self.observer is not None:
            held, self._held_in_phase = self._held_in_phase, {}
            self.observer.enter(phase, self._record.step, held)
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
        for owner in {block.want.owner for block in self._blocks.values() if block.lease in self._held}:
            ours = (self._held.get(lease, 0) for lease, block in self._blocks.items() if block.want.owner == owner)
            self._held_in_phase[owner] = max(sum(ours), self._held_in_phase.get(owner, 0))

    def trimmed(self, owner: str) -> None:
        """A worker's allocator has given back what was freed: it holds what is leased to it now."""
        self._trimmed[owner] = self._kept[owner] = self._private().get(owner, 0)
        self._count_leased()

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
            wants, then = self._waiting.pop(grant.request)
            then(self._grant(grant, wants))

    def _place(self, want: Want) -> Device:
        return self._host if want.on_host and self._host is not None else self._device

    def _memory(self, want: Want) -> MemoryKind:
        return MemoryKind.HOST if want.on_host or self._host is None else MemoryKind.CUDA

    def _sized(self, want: Want) -> Want:
        """With what it takes instead of what is needed: the ledger counts whole granules of a GPU."""
        if not want.segment:
            return want
        return replace(want, size_bytes=taken_bytes(want.size_bytes, self._memory(want)))

    def _request(self, want: Want) -> LeaseRequest:
        return LeaseRequest(
            device=self._place(want),
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

    def _grant(self, granted: Granted, wants: tuple[Want, ...]) -> tuple[Block, ...]:
        return tuple(self._make(lease.id, want) for lease, want in zip(granted.leases, wants, strict=True))

    def _make(self, lease: int, want: Want) -> Block:
        segment = None
        if want.segment:
            segment = self._holder.create(want.kind, want.size_bytes, lease, self._memory(want))
        block = Block(lease=lease, want=want, segment=segment)
        self._blocks[lease] = block
        self._count_leased()
        self._since[lease] = time.monotonic()
        self._record.append(
            LeaseGranted(
                lease=lease,
                kind=want.kind,
                owner=want.owner,
                device=self._place(want),
                size_bytes=want.size_bytes,
                last_consumer=want.last_consumer,
                segment=segment.segment if segment else None,
                step=self._record.step,
            )
        )
        return block

    def _count_leased(self) -> None:
        segments = sum(block.want.size_bytes for block in self._on_device() if block.segment is not None)
        for owner, size_bytes in self._private().items():
            self._kept[owner] = max(size_bytes, self._kept.get(owner, 0))
        private = {
            owner: size_bytes + (self.scratch.get(owner, 0) if size_bytes > self._trimmed.get(owner, 0) else 0)
            for owner, size_bytes in sorted(self._kept.items())
        }
        self.leased = Leased(segments_bytes=segments, private=tuple((o, size) for o, size in private.items() if size))

    def _on_device(self) -> list[Block]:
        return [block for block in self._blocks.values() if not (block.want.on_host and self._host is not None)]

    def _private(self) -> dict[str, int]:
        """Private memory that is leased on the device now, by owner."""
        private: dict[str, int] = {}
        for block in self._on_device():
            if block.segment is None:
                private[block.want.owner] = private.get(block.want.owner, 0) + block.want.size_bytes
        return private
