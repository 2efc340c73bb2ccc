"""Resident memory of every process of a run while it goes on, and whether it grows from epoch to epoch.

Owns reading /proc, the samples, and what they say. Knows nothing of what the run does.

Growth of a process: its median over the last tenth of the last epoch, over that of the last tenth of the first epoch.
The first epoch is when caches fill and allocators settle; the others must add nothing.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec import Struct

from rollplex.errors import DataError

PERIOD_S = 0.5
TAIL = 0.1
"""The part of an epoch, at its end, whose samples stand for it."""
_MODULES = {
    "rollplex_coordinator": "coordinator",
    "rollplex_rollout": "rollout",
    "rollplex_prefix": "prefix",
    "rollplex_trainer": "trainer",
    "rollplex.data": "input",
    "rollplex.rewards": "reward",
    "rollplex.rewards.runner": "reward functions",
}


class Sample(Struct, frozen=True, kw_only=True):
    """One look at all processes."""

    at_s: float
    """Since the first sample."""
    iterations: int
    """That were done."""
    bytes: dict[str, int]
    """Resident, shared pages included, by name of process."""


class Growth(Struct, frozen=True, kw_only=True):
    """One process over the epochs."""

    process: str
    epochs: tuple[float, ...]
    """Median of resident bytes over the last tenth of each."""

    @property
    def relative(self) -> float:
        """From the end of the first epoch to the end of the last; 0.01 is one per cent."""
        return self.epochs[-1] / self.epochs[0] - 1.0


class Watch:
    """Samples the descendants of this process in a thread of its own, until it is left.

    Args:
        iterations: says how many are done.
        root: where proc/ is, for tests.
    """

    def __init__(self, iterations: Callable[[], int], *, pid: int, root: Path = Path("/")) -> None:
        self.samples: list[Sample] = []
        self._iterations = iterations
        self._pid = pid
        self._root = root
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="resident memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join(10 * PERIOD_S)

    def _watch(self) -> None:
        start_s = time.monotonic()
        while not self._end.wait(PERIOD_S):
            found = resident(self._pid, self._root)
            if found:
                at_s = time.monotonic() - start_s
                self.samples.append(Sample(at_s=at_s, iterations=self._iterations(), bytes=found))


def resident(pid: int, root: Path = Path("/")) -> dict[str, int]:
    """Resident bytes of the named descendants of a process; those of one name together."""
    parents: dict[int, int] = {}
    for entry in (root / "proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            parents[int(entry.name)] = parent
    found: dict[str, int] = {}
    for child in parents:
        if _descends(child, pid, parents):
            name, size = _name(root / "proc" / str(child)), _resident(root / "proc" / str(child))
            if name and size:
                found[name] = found.get(name, 0) + size
    return found


def growth(samples: Sequence[Sample], iterations_per_epoch: float, epochs: int) -> tuple[Growth, ...]:
    """What the samples say of each process.

    Raises:
        DataError: an epoch went by without a sample near its end.
    """
    tails: list[list[Sample]] = []
    for epoch in range(1, epochs + 1):
        first, last = (epoch - TAIL) * iterations_per_epoch, epoch * iterations_per_epoch
        tail = [sample for sample in samples if first <= sample.iterations <= last]
        if not tail:
            raise DataError(
                "An epoch has no sample near its end",
                got=f"{len(samples)} samples, none between iterations {first:.0f} and {last:.0f}",
                needed=f"one every {PERIOD_S:g} s",
                do="Use more rows.",
            )
        tails.append(tail)
    names = sorted(set.intersection(*({name for sample in tail for name in sample.bytes} for tail in tails)))
    return tuple(
        Growth(
            process=name,
            epochs=tuple(statistics.median(s.bytes[name] for s in tail if name in s.bytes) for tail in tails),
        )
        for name in names
    )


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    seen = set[int]()
    while pid in parents and pid not in seen:
        seen.add(pid)
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False


def _parent(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None  # it has ended meanwhile


def _name(entry: Path) -> str:
    try:
        words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return next((name for module, name in _MODULES.items() if module in words), "")


def _resident(entry: Path) -> int:
    try:
        return int((entry / "statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
