"""What a configuration will need at its peak, before anything is loaded. Pure.

Two kinds of planned blocks. *Standing* ones are there whenever their phase is: permanent leases and reservations.
*Units* can wait for each other; the blocks of one unit are granted together (`ledger`). Hence for each phase

    minimum  =  standing + the largest unit        below this some unit could never be granted
    ample    =  standing + all units at once       above this nothing ever waits

which are exactly the ledger's bounds: it refuses a request for ever if and only if the minimum is above the budget, and
what it holds is never above the ample peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from rollplex.config.host import less_overhead
from rollplex.errors import BudgetError
from rollplex.journal.phases import WORKING_PHASES, Phase
from rollplex.protocol.common import HOST_INDEX, Device, Kind
from rollplex_coordinator.decisions.leases import check_size
from rollplex_coordinator.decisions.ledger_table import align, number


class PlannedBlock(Struct, frozen=True, kw_only=True):
    """One block that the configuration will ask for. `unit`: the name of the unit that it belongs to, which can wait;
    empty for a standing block."""

    device: Device
    kind: Kind
    owner: str
    purpose: str
    size_bytes: int
    phases: frozenset[Phase]
    unit: str = ""


class PhasePeak(Struct, frozen=True, kw_only=True):
    """Prediction for one phase of one device."""

    phase: Phase
    standing_bytes: int
    largest_unit: str
    """Empty if no unit lives in this phase."""
    largest_unit_bytes: int
    all_units_bytes: int

    @property
    def minimum_bytes(self) -> int:
        return self.standing_bytes + self.largest_unit_bytes

    @property
    def ample_bytes(self) -> int:
        return self.standing_bytes + self.all_units_bytes


class DevicePeaks(Struct, frozen=True, kw_only=True):
    """Prediction for one device: one entry per phase in which anything lives."""

    device: Device
    phases: tuple[PhasePeak, ...]

    @property
    def minimum_bytes(self) -> int:
        """A budget below this is refused."""
        return max((peak.minimum_bytes for peak in self.phases), default=0)

    @property
    def ample_bytes(self) -> int:
        """With a budget of this nothing waits."""
        return max((peak.ample_bytes for peak in self.phases), default=0)


def plan_peak(blocks: Iterable[PlannedBlock]) -> tuple[DevicePeaks, ...]:
    """The predicted peaks of each device, in the order of devices.

    Raises:
        BudgetError: a size that is not a number of bytes.
    """
    planned = list(blocks)
    for block in planned:
        check_size(block.size_bytes, block.purpose)
    return tuple(
        DevicePeaks(
            device=device,
            phases=tuple(
                _phase_peak(phase, alive)
                for phase in WORKING_PHASES
                if (alive := [x for x in planned if x.device == device and phase in x.phases])
            ),
        )
        for device in sorted({block.device for block in planned})
    )


def check_fits(
    blocks: Sequence[PlannedBlock], budgets: Mapping[Device, int], overhead_bytes: int = 0, *, free_bytes: int = 0
) -> tuple[DevicePeaks, ...]:
    """`plan_peak`, and whether every device can hold its minimum.

    Args:
        blocks: what will be asked for.
        budgets: what leases may take on each device.
        overhead_bytes: what went off `memory.budget` before; for the words of the refusal only.
        free_bytes: of a GPU, for the same: no budget can be larger. 0: not known.

    Raises:
        BudgetError: one cannot, or has no budget; shows the table.
    """
    peaks = plan_peak(blocks)
    for peak in peaks:
        budget = budgets.get(peak.device, 0)
        if peak.minimum_bytes > budget:
            worst = max(peak.phases, key=lambda phase: phase.minimum_bytes)
            # memory.budget and memory.overhead speak of the device that is computed on.
            overhead = 0 if peak.device.index == HOST_INDEX else overhead_bytes
            raised = f"Raise memory.budget to {-(-(peak.minimum_bytes + overhead) // 2**20)}MiB or more"
            if peak.device.index == HOST_INDEX:
                raised = "Give the node more host memory"
            elif 0 < free_bytes < peak.minimum_bytes + overhead:
                raised = f"Use a GPU with more memory (this one has {free_bytes // 2**20} MiB free)"
            raise BudgetError(
                "This configuration does not fit into the memory budget",
                got=f"{less_overhead(budget + overhead, overhead)}: a budget of {number(budget)} bytes",
                needed=f"at least {number(peak.minimum_bytes)} bytes, in {worst.phase.name}",
                do=f"{raised}, or make smaller what the table shows.\n{peaks_table(blocks, budgets)}",
                where=f"device {peak.device}",
            )
    return peaks


def check_shares_fit(
    blocks: Sequence[PlannedBlock],
    budgets: Mapping[Device, int],
    devices: Sequence[Device],
    overhead_bytes: int,
    *,
    once_bytes: int,
    free_bytes: int = 0,
) -> tuple[DevicePeaks, ...]:
    """`check_fits` for several devices, which have equal shares of one budget.

    Args:
        devices: those that share it.
        once_bytes: what the node has once of the same budget.
        free_bytes: of each GPU, as `check_fits` takes it.

    Raises:
        BudgetError: one cannot hold its minimum; shows the table of the fullest.
    """
    peaks = plan_peak(blocks)
    fullest = max((peak for peak in peaks if peak.device in devices), key=lambda peak: peak.minimum_bytes)
    share = budgets.get(fullest.device, 0)
    if fullest.minimum_bytes > share:
        worst = max(fullest.phases, key=lambda phase: phase.minimum_bytes)
        whole = len(devices) * fullest.minimum_bytes + once_bytes + overhead_bytes
        raised = f"Raise memory.budget to {-(-whole // 2**20)}MiB or more"
        if 0 < len(devices) * free_bytes < whole:
            raised = f"Use GPUs with more memory (one of these has {free_bytes // 2**20} MiB free)"
        ours = [block for block in blocks if block.device == fullest.device]
        raise BudgetError(
            "This configuration does not fit into the memory budget",
            got=f"a budget of {number(share)} bytes on each of {len(devices)} devices",
            needed=f"at least {number(fullest.minimum_bytes)} bytes on each, in {worst.phase.name}",
            do=f"{raised}, or make smaller what the table of the fullest device shows.\n{peaks_table(ours, budgets)}",
            where=f"device {fullest.device}",
        )
    return peaks


def peaks_table(blocks: Sequence[PlannedBlock], budgets: Mapping[Device, int]) -> str:
    """Every standing block, the largest unit, minimum, ample and budget, per phase; one block of lines per device."""
    return "\n".join(_device_table(blocks, peak, budgets.get(peak.device, 0)) for peak in plan_peak(blocks))


def _phase_peak(phase: Phase, alive: Sequence[PlannedBlock]) -> PhasePeak:
    units: dict[str, int] = {}
    for block in alive:
        if block.unit:
            units[block.unit] = units.get(block.unit, 0) + block.size_bytes
    largest = max(units, key=lambda unit: units[unit], default="")
    return PhasePeak(
        phase=phase,
        standing_bytes=sum(block.size_bytes for block in alive if not block.unit),
        largest_unit=largest,
        largest_unit_bytes=units.get(largest, 0),
        all_units_bytes=sum(units.values()),
    )


def _device_table(blocks: Sequence[PlannedBlock], peaks: DevicePeaks, budget: int) -> str:
    standing = [block for block in blocks if block.device == peaks.device and not block.unit]
    num_units = len({block.unit for block in blocks if block.device == peaks.device and block.unit})
    rows = [("bytes", "by", *(peak.phase.name for peak in peaks.phases))]
    for block in sorted(standing, key=lambda block: -block.size_bytes):
        cells = (number(block.size_bytes) if peak.phase in block.phases else "" for peak in peaks.phases)
        rows.append((f"{block.kind}: {block.purpose}", block.owner, *cells))
    if num_units:
        largest = (number(peak.largest_unit_bytes) for peak in peaks.phases)
        rows.append((f"largest of {num_units} units that can wait", _names(peaks), *largest))
    rows.append(("minimum", "", *(number(peak.minimum_bytes) for peak in peaks.phases)))
    rows.append(("nothing waits", "", *(number(peak.ample_bytes) for peak in peaks.phases)))
    rows.append(("budget", "", *(number(budget) for _ in peaks.phases)))
    over = [max(0, peak.minimum_bytes - budget) for peak in peaks.phases]
    if any(over):
        rows.append(("short by", "", *(number(size) if size else "" for size in over)))
    return f"device {peaks.device}\n{align(rows)}"


def _names(peaks: DevicePeaks) -> str:
    return ", ".join(dict.fromkeys(peak.largest_unit for peak in peaks.phases if peak.largest_unit))
