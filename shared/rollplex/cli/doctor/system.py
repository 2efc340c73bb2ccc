"""Python, kernel, cores, memory, limits, and the few things of Linux that Rollplex stands on, each tried out."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from rollplex.cli.doctor.finding import Finding, note, ok, problem
from rollplex.config.config import HOST_OVERHEAD_BYTES
from rollplex.config.host import memory_limit_bytes
from rollplex.errors import RollplexError
from rollplex.memory import fds
from rollplex.memory.available import available_bytes
from rollplex.memory.segment import backend
from rollplex.terminal.words import size

MIN_PYTHON = (3, 11)
FEW_FILES, TOO_FEW_FILES = 1024, 256
_PAGE_BYTES = 4096
_DEADLINE_S = 2.0


def check(shown: Mapping[str, str], root: Path = Path("/")) -> Iterator[Finding]:
    """Everything about the system.

    Args:
        shown: environment variables to tell.
        root: where proc/ and sys/ are; tests make their own.
    """
    yield _python()
    yield _kernel(root)
    yield _cores(root)
    yield from _memory(root)
    yield from _limits()
    yield _segments()
    yield _descriptors()
    yield _handles()
    yield _threads(shown)


def _python() -> Finding:
    text = f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}"
    if sys.version_info[:2] < MIN_PYTHON:
        return problem("python", text, "Rollplex needs Python 3.11 or newer.")
    return ok("python", text)


def _kernel(root: Path) -> Finding:
    text = f"{_distribution(root)}, {platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() != "Linux":
        return problem("system", text, "Rollplex needs Linux.")
    return ok("system", text)


def _distribution(root: Path) -> str:
    try:
        lines = (root / "etc/os-release").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "distribution unknown"
    names = [line.partition("=")[2].strip('"') for line in lines if line.startswith("PRETTY_NAME=")]
    return names[0] if names else "distribution unknown"


def _cores(root: Path) -> Finding:
    usable, quota = len(os.sched_getaffinity(0)), cpu_quota(root)
    text = f"{os.cpu_count()} in the machine, {usable} usable by this process"
    text += ", no quota of a control group" if quota is None else f", a control group's quota of {quota:g}"
    if quota is not None and quota < usable:
        return note("cores", text, "Processes beyond the quota are held up; run.threads counts for each worker.")
    return ok("cores", text)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores that our control group, or one above it, may use; None: no limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            quotas += [_v2(folder) for folder in _folders(root / "sys/fs/cgroup", group)]
        elif "cpu" in controllers.split(","):
            quotas += [_v1(folder) for folder in _folders(root / "sys/fs/cgroup/cpu", group)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _folders(mount: Path, group: str) -> list[Path]:
    """The group and those above it; in a container the mount itself is the group."""
    folder = mount / group.lstrip("/")
    return [place for place in (folder, *folder.parents) if place == mount or mount in place.parents]


def _v2(folder: Path) -> float | None:
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _v1(folder: Path) -> float | None:
    quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _memory(root: Path) -> Iterator[Finding]:
    try:
        limit, available = memory_limit_bytes(root), available_bytes(root)
    except RollplexError as error:
        yield problem("memory", str(error), "Set memory.budget in each configuration.")
        return
    overhead = HOST_OVERHEAD_BYTES
    leases = limit // 2 - overhead
    text = f"{size(limit)} (machine or control group), {size(available)} available now"
    budget = f"default budget {size(limit // 2)}, less {size(overhead)} for the processes themselves"
    if leases <= 0:
        do = "Set memory.budget (more than half of what there is) or a smaller memory.overhead in the configuration."
        yield problem("memory", f"{text}; {budget}: nothing is left for a model", do)
    elif available < limit // 2:
        yield note("memory", f"{text}; {budget}", "Other programs use much of it: lower memory.budget, or end them.")
    else:
        yield ok("memory", f"{text}; {budget}")


def _limits() -> Iterator[Finding]:
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_limit(files)} (hard {_limit(hard)})"
    if files != resource.RLIM_INFINITY and files < TOO_FEW_FILES:
        yield problem("open files", text, f"ulimit -n {FEW_FILES}")
    elif files != resource.RLIM_INFINITY and files < FEW_FILES:
        yield note("open files", text, f"ulimit -n {FEW_FILES}")
    else:
        yield ok("open files", text)
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space == resource.RLIM_INFINITY:
        yield ok("address space", "unlimited")
    else:
        yield problem("address space", size(space), "Every process maps the whole model: ulimit -v unlimited.")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if locked == resource.RLIM_INFINITY else size(locked)
    yield ok("locked memory", f"{text} (only GPUs need it)")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _segments() -> Finding:
    host = backend("host")
    try:
        fd = host.create(_PAGE_BYTES, "rollplex-doctor")
        try:
            with host.map(fd, _PAGE_BYTES) as mapping:
                mapping.write(0, b"doctor")
                if mapping.read(0, 6) != b"doctor":
                    return problem("segments", "what was written is not what is read", "Look at the kernel's log.")
        finally:
            os.close(fd)
    except (RollplexError, OSError) as error:
        return problem("segments", str(error), "Shared memory that is sealed (memfd_create) is needed: another kernel.")
    return ok("segments", "shared memory can be made, sealed and mapped (memfd)")


def _descriptors() -> Finding:
    try:
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with left, right, open(os.devnull, "rb") as file:  # noqa: PTH123 - any descriptor will do
            fds.send(left, b"doctor", [file.fileno()], _DEADLINE_S)
            _, (received,) = fds.recv(right, _DEADLINE_S, 100, 1)
            try:
                same = os.path.sameopenfile(received, file.fileno())
            finally:
                os.close(received)
    except (RollplexError, EOFError, OSError, ValueError) as error:
        return problem("descriptors", str(error), "Descriptors over unix sockets are needed (a sandbox?).")
    if not same:
        return problem("descriptors", "another file arrived than was sent", "Look at the kernel and its sandbox.")
    return ok("descriptors", "can be passed over a unix socket (SCM_RIGHTS)")


def _handles() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.eventfd(0))
    except OSError as error:
        return problem("handles", str(error), "pidfd_open and eventfd are needed: Linux 5.3 or newer.")
    return ok("handles", "pidfd and eventfd work")


def _threads(shown: Mapping[str, str]) -> Finding:
    told = ", ".join(f"{name}={value}" for name, value in shown.items()) or "nothing set"
    return ok("environment", f"{told}; a run's services get run.threads, whatever OMP_NUM_THREADS says")
