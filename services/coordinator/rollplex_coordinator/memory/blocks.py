"""What somebody needs memory for, and what was granted: on one device, or on each of some that work together.

Owns the words. Does not know: the ledger, segments' descriptors.
"""

from __future__ import annotations

from msgspec import Struct

from rollplex.journal.phases import Phase
from rollplex.protocol.common import Device, Kind, LeaseRef, SegmentRef


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

    @property
    def standing(self) -> bool:
        """It lives from LOAD to the end, whichever process is there."""
        return (self.first, self.last) == (Phase.LOAD, Phase.DRAIN)


class Block(Struct, frozen=True, kw_only=True):
    """A granted block. `segment` is None for private memory."""

    lease: int
    want: Want
    segment: SegmentRef | None
    device: Device = Device()
    """Of the process that it is for, also where it lies in host memory."""

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


class Blocks(Struct, frozen=True, kw_only=True):
    """A block on each of some devices; of a process that is alone, the one that it has."""

    blocks: tuple[Block, ...]
    """By rank, or in the order of the devices that were named."""

    def on(self, rank: int) -> Block:
        """That of a rank."""
        return self.blocks[rank]

    @property
    def leader(self) -> Block:
        """That of rank 0."""
        return self.blocks[0]

    @property
    def lease(self) -> int:
        """The leader's."""
        return self.leader.lease

    @property
    def want(self) -> Want:
        """The leader's."""
        return self.leader.want

    @property
    def segment(self) -> SegmentRef | None:
        """The leader's."""
        return self.leader.segment

    @property
    def private(self) -> LeaseRef:
        """The leader's."""
        return self.leader.private

    @property
    def ref(self) -> SegmentRef:
        """The leader's."""
        return self.leader.ref
