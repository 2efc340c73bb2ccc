"""How much memory this host, or the control group we run in, has. Reads /proc and /sys only."""

from __future__ import annotations

from pathlib import Path

from rollplex.config.config import Config
from rollplex.errors import ConfigError


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """The smaller of the host's memory and the limits of our control group and those above it (v2 or v1).

    Args:
        root: where proc/ and sys/ are; tests make their own.

    Raises:
        ConfigError: /proc/meminfo does not say.
    """
    return min([_host_bytes(root), *_group_limits(root)])


def budget_bytes(config: Config, limit_bytes: int) -> int:
    """Bytes that leases may take in all: the budget without the overhead.

    Args:
        limit_bytes: on GPUs the HBM that the run can have in all, which is the default; else the memory of this host,
            half of which is.

    Raises:
        ConfigError: nothing is left, or a GPU does not have so much.
    """
    budget, overhead, on_gpu = config.memory.budget, config.overhead_bytes, config.device.kind == "cuda"
    several = config.parallel.devices > 1
    if budget is None:
        budget = limit_bytes if on_gpu else limit_bytes // 2
    elif on_gpu and budget > limit_bytes:
        raise ConfigError(
            f"The GPU{'s have' if several else ' has'} less memory free than the budget says",
            got=f"{_mib(budget)} of memory.budget, {_mib(limit_bytes)} free"
            + (f" on {config.parallel.devices} GPUs in equal shares" if several else ""),
            do="Lower memory.budget, or end what else uses the GPU (`nvidia-smi`).",
            where="memory.budget",
        )
    if budget <= overhead:
        raise ConfigError(
            "The overhead leaves nothing of the memory budget",
            got=less_overhead(budget, overhead),
            do="Raise memory.budget, or lower memory.overhead.",
            where="memory.budget",
        )
    return budget - overhead


def host_budget_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that leases may take where the workers compute on a GPU: half of what there is.

    Raises:
        ConfigError: as `memory_limit_bytes`.
    """
    return memory_limit_bytes(root) // 2


def less_overhead(budget_bytes: int, overhead_bytes: int) -> str:
    """What leases may take, as errors show it: the whole budget and what goes off it."""
    if not overhead_bytes:
        return _mib(budget_bytes)
    return f"{_mib(budget_bytes)}, less {_mib(overhead_bytes)} of memory.overhead (the processes themselves)"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f}".removesuffix(".0") + " MiB"


def _host_bytes(root: Path) -> int:
    file = root / "proc/meminfo"
    try:
        for line in file.read_text().splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    raise ConfigError(
        "The size of the host's memory is not known", do="Set memory.budget.", where=f"{file}: memory.budget"
    )


def _group_limits(root: Path) -> list[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits: list[int] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            limits += _walk(root / "sys/fs/cgroup", group, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _walk(root / "sys/fs/cgroup/memory", group, "memory.limit_in_bytes")
    return limits


def _walk(mount: Path, group: str, file: str) -> list[int]:
    """Limits of the group and of every group above it. In a container the mount itself is the group."""
    folder = mount / group.lstrip("/")
    folders = [folder, *folder.parents] if ".." not in folder.parts else [mount]
    limits: list[int] = []
    for place in folders:
        if mount != place and mount not in place.parents:
            break
        try:
            text = (place / file).read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # "max" otherwise
            limits.append(int(text))
    return limits
