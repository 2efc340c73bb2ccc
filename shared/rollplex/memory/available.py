"""How much host memory can still be given.

Owns: reading /proc/meminfo and the memory cgroup, version 1 and 2. Does not know: segments, budgets, swap (a segment
that is swapped out is not worth having).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rollplex.errors import SegmentError

_UNLIMITED = 2**60
_FRESH_S = 1.0
_LITTLE = 16
"""A request for less than this part of what is left is little."""


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process could still take without swapping or meeting the limit of its memory cgroup.

    Page cache counts as available, in the machine and in the cgroup. The answer is already old when it arrives.

    Args:
        root: where proc/ and sys/ are, for tests.

    Raises:
        SegmentError: /proc/meminfo cannot be read.
    """
    return max(0, min(_machine(root), *(_cgroup(folder) for folder in _cgroups(root))))


class Headroom:
    """What is available, without asking the kernel for every small segment (some ten files each time).

    Between two answers of the kernel it counts down what it let through; what others take meanwhile it learns a second
    later, or with the next request that is not little.
    """

    def __init__(self, read: Callable[[], int] = available_bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._left = 0
        self._read_s = -_FRESH_S

    def left(self, wanted_bytes: int) -> int:
        """Bytes that can still be given, before `wanted_bytes` is; if that fits, it counts as given.

        Raises:
            SegmentError: as `available_bytes`.
        """
        now = self._clock()
        if now - self._read_s >= _FRESH_S or wanted_bytes > self._left // _LITTLE:
            self._left, self._read_s = self._read(), now
        left = self._left
        self._left = max(0, left - wanted_bytes)
        return left


def _machine(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(":")
            if key == "MemAvailable":
                return int(value.split()[0]) * 1024
    except (OSError, ValueError) as error:
        raise SegmentError("The machine does not say how much memory it has", got=str(error)) from error
    raise SegmentError("The machine does not say how much memory it has", got="no MemAvailable in /proc/meminfo")


def _cgroups(root: Path) -> list[Path]:
    """The folders whose limits hold for this process, its own first. In a container its own may not be visible; the
    top of the mount is then the container's."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    folders = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        parts = [part for part in path.split("/") if part not in ("", "..")]
        folders += [top.joinpath(*parts[: n + 1]) for n in range(len(parts))]
    return folders


def _cgroup(folder: Path) -> int:
    for limit_name, usage_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        try:
            limit = (folder / limit_name).read_text(encoding="ascii").strip()
            if limit == "max" or int(limit) >= _UNLIMITED:
                continue
            usage = int((folder / usage_name).read_text(encoding="ascii"))
            stat = (folder / "memory.stat").read_text(encoding="ascii")
        except (OSError, ValueError):
            continue
        counts = dict(line.split() for line in stat.splitlines())
        cache = int(counts.get(f"{prefix}active_file", 0)) + int(counts.get(f"{prefix}inactive_file", 0))
        return int(limit) - usage + cache
    return _UNLIMITED
