"""Carries out the transfers of a layout plan: what rollouts read of what training ranks own, by ordinary copies between
mapped segments.

    a device that trains     its own trainer copies into its segment, from the segments of the other devices
    one that only samples    a trainer of another device fills it: a target

The reader's side copies, so that each segment has one writer, and no process waits for another's copy. Owns: the copies
into one segment, its header and digest. Does not know: when all ranks have stepped, which is said by the coordinator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rollplex.errors import StateError
from rollplex.layout.parallel.plan import DevicePlan, LayoutPlan
from rollplex.layout.parallel.transfers import Transfer, target_transfers, transfers
from rollplex.layout.parameters import ParameterTable
from rollplex.memory.digest import digest
from rollplex.memory.header import HeaderPage, State
from rollplex.memory.segment import Mapping
from rollplex.memory.tensors import DTYPES, tensor
from rollplex.model.parallel.views import place_view


@dataclass(frozen=True, kw_only=True)
class Copied:
    """Bytes that one publication copied."""

    refreshed: int = 0
    rebuilt: int = 0

    def __add__(self, other: Copied) -> Copied:
        return Copied(refreshed=self.refreshed + other.refreshed, rebuilt=self.rebuilt + other.rebuilt)


class Destination:
    """A segment that rollouts read, and whose one writer this process is."""

    def __init__(
        self,
        mapping: Mapping,
        table: ParameterTable,
        run_id: str,
        device: DevicePlan,
        lists: tuple[tuple[Transfer, ...], tuple[Transfer, ...]],
    ) -> None:
        """lists: what is copied at LOAD, and after an update."""
        self.mapping = mapping
        self.table = table
        self.total_bytes = device.storage.total_bytes
        self.header = HeaderPage(mapping, run_id=run_id, table_hash=table.hash)
        self.numbers = numbers_of(mapping, table, self.total_bytes)
        self._lists = lists

    def fill(self, sources: Sequence[Tensor], *, first: bool) -> Copied:
        """Copy what others own. sources: the segments of all devices of the training plan (`numbers_of`)."""
        refreshed = rebuilt = 0
        for transfer in self._lists[0] if first else self._lists[1]:
            source = place_view(sources[transfer.source.device], transfer.source, transfer.parameter)
            place_view(self.numbers, transfer.target, transfer.parameter).copy_(source)
            refreshed += transfer.size_bytes if transfer.kind == "refresh" else 0
            rebuilt += transfer.size_bytes if transfer.kind == "rebuild" else 0
        return Copied(refreshed=refreshed, rebuilt=rebuilt)

    def require_update(self, version: int) -> None:
        """Whether an update to `version` is going on. Raises StateError."""
        header = self.header.read()
        if (header.state, header.version + 1) != (State.UPDATING, version):
            raise StateError(
                f"Weights cannot be published as version {version} now",
                got=f"version {header.version}, {header.state.name}",
                needed=f"version {version - 1}, {State.UPDATING.name}",
            )

    def digest(self) -> str:
        """Of all that the segment holds now."""
        return digest(self.mapping, self.table, self.total_bytes)

    def show(self, version: int, found: str, *, first: bool) -> None:
        """Say in the header that `version` may be read. found: its digest. Raises SegmentError as `HeaderPage`."""
        if first:
            self.header.initialise(version, found)
        else:
            self.header.publish(version, found)


def own_destination(mapping: Mapping, table: ParameterTable, run_id: str, device: DevicePlan) -> Destination:
    """The segment of a device that trains."""
    lists = transfers(device, trained_only=False), transfers(device, trained_only=True)
    return Destination(mapping, table, run_id, device, lists)


def target_destination(
    mapping: Mapping, table: ParameterTable, run_id: str, device: DevicePlan, training: LayoutPlan
) -> Destination:
    """The segment of a device that only samples. device: its plan. training: of the devices that train."""
    lists = (
        target_transfers(training, device, trained_only=False),
        target_transfers(training, device, trained_only=True),
    )
    return Destination(mapping, table, run_id, device, lists)


def numbers_of(mapping: Mapping, table: ParameterTable, total_bytes: int) -> Tensor:
    """All of a segment, header included, as one row of numbers of the weights."""
    return tensor(mapping, 0, (total_bytes // table.item_bytes,), DTYPES[table.dtype])
