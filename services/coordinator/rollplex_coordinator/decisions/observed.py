"""What the driver says of HBM against what the books say. Pure.

    used by the driver  =  baseline (before the run)  +  leased (segments, private)  +  overhead  +  difference

Overhead is measured once, when everything is loaded and nothing works. The difference should be small: above, somebody
holds what no lease covers; below, a prediction is too large, and work waits for memory that is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from rollplex.errors import BudgetError
from rollplex.nvml import GpuProcess

TOLERANCE = 0.02
"""Of the device: a larger difference is told."""


class Leased(Struct, frozen=True, kw_only=True):
    """The books of the GPU at one moment. private: by owner."""

    segments_bytes: int = 0
    private: tuple[tuple[str, int], ...] = ()

    @property
    def private_bytes(self) -> int:
        return sum(size for _, size in self.private)

    @property
    def total_bytes(self) -> int:
        return self.segments_bytes + self.private_bytes


class Reading(Struct, frozen=True, kw_only=True):
    """What the driver said at one moment, and the books of that moment."""

    used_bytes: int
    leased: Leased


class Account(Struct, frozen=True, kw_only=True):
    """One reading explained."""

    reading: Reading
    baseline_bytes: int
    overhead_bytes: int

    @property
    def ours_bytes(self) -> int:
        """What is used since the run began."""
        return self.reading.used_bytes - self.baseline_bytes

    @property
    def difference_bytes(self) -> int:
        """Above zero: more is held than is leased."""
        return self.ours_bytes - self.reading.leased.total_bytes - self.overhead_bytes


def measured_overhead(reading: Reading, baseline_bytes: int) -> int:
    """What is used beside leases, when nothing works."""
    return max(0, reading.used_bytes - baseline_bytes - reading.leased.total_bytes)


def complaint(account: Account, held: Mapping[str, int], total_bytes: int) -> str:
    """What is not as the books say, part by part; empty while the difference is small.

    Args:
        held: by owner: what it measured itself under its private leases, at most, in the phase.
        total_bytes: of the device.
    """
    difference = account.difference_bytes
    if abs(difference) <= TOLERANCE * total_bytes:
        return ""
    leased = account.reading.leased
    private = ", ".join(f"{owner} {_gib(size)} (held {_of(held, owner)})" for owner, size in leased.private)
    parts = f"segments {_gib(leased.segments_bytes)}, private {private or 'none'}"
    more = "more than its leases and overhead explain" if difference > 0 else "less than is leased"
    return (
        f"the GPU holds {_gib(abs(difference))} {more}: {_gib(account.ours_bytes)} used; {parts}, "
        f"overhead {_gib(account.overhead_bytes)}, unexplained {_gib(difference)}"
    )


def overdrawn(
    account: Account, budget_bytes: int, processes: Sequence[GpuProcess], names: Mapping[int, str]
) -> BudgetError | None:
    """The error of a node that held more than its budget; None if it did not.

    Args:
        budget_bytes: everything, overhead included.
        processes: who is on the GPU now.
        names: by pid, of those that are ours.
    """
    if account.ours_bytes <= budget_bytes:
        return None
    by_size = sorted(processes, key=lambda process: -(process.used_bytes or 0))
    named = [(names.get(process.pid, f"pid {process.pid}, not ours"), process.used_bytes or 0) for process in by_size]
    who = ", ".join(f"{name} {_gib(size)}" for name, size in named) or "nobody"
    return BudgetError(
        "The GPU's budget was exceeded",
        got=f"{_gib(account.ours_bytes)} used, {_gib(account.reading.leased.total_bytes)} leased; {who}",
        needed=f"at most {_gib(budget_bytes)}",
        do="Raise memory.budget or memory.overhead, make units smaller (batching.*), or end what is not ours.",
        where=named[0][0] if named else "",
    )


def _of(held: Mapping[str, int], owner: str) -> str:
    return _gib(held[owner]) if owner in held else "not measured"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
