"""What a bench ran on: processor, memory, system, versions, and the commit of a checkout. Reads, changes nothing."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from msgspec import Struct

import rollplex
from rollplex.config.host import memory_limit_bytes
from rollplex.nvml import open_gpu

PACKAGES: Final = ("torch", "transformers", "tokenizers", "numpy")
OPTIONAL: Final = ("sglang", "triton", "cuda-bindings", "nvidia-ml-py")
"""Named if they are installed."""
TOLD: Final = ("torch", "transformers", "sglang")
_GIT_S = 10.0


class Machine(Struct, frozen=True, kw_only=True):
    """Hardware and system."""

    cpu: str
    cores: int
    """That this process may use."""
    memory_bytes: int
    system: str
    gpu: str = ""
    """The one that the bench uses, or those; empty: none."""
    gpu_bytes: int = 0
    """Of one."""
    driver: str = ""
    """Of the GPU."""

    @property
    def text(self) -> str:
        """In a few words."""
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        host = f"{self.cpu}, {cores}, {self.memory_bytes / 2**30:.0f} GiB"
        if not self.gpu:
            return host
        return f"{self.gpu}, {self.gpu_bytes / 2**30:.0f} GiB, driver {self.driver}, on {host}"


class Software(Struct, frozen=True, kw_only=True):
    """Versions."""

    rollplex: str
    python: str
    packages: dict[str, str]
    commit: str = ""
    """Of the checkout that Rollplex runs from; empty outside of one."""
    changes: str = ""
    """Digest of what differs from the commit; empty if nothing does."""

    @property
    def text(self) -> str:
        """In one line."""
        parts = [f"Rollplex {self.rollplex}", f"Python {self.python}"]
        parts += [f"{name} {version}" for name, version in self.packages.items() if name in TOLD]
        if self.commit:
            parts.append(f"commit {self.commit[:10]}{' with changes' if self.changes else ''}")
        return ", ".join(parts)


def read_machine(gpu: int | None = None, gpus: int = 1) -> Machine:
    """This one.

    Args:
        gpu: the GPU that is used, as nvidia-smi counts; None: none.
        gpus: how many are used, from it on, all of a kind.

    Raises:
        ConfigError: the system does not say how much memory it has, or the GPU cannot be used.
    """
    used = None
    if gpu is not None:
        opened = open_gpu(gpu)
        used = opened.info
        opened.close()
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory_limit_bytes(),
        system=f"{_system()}, Linux {platform.release()}",
        gpu="" if used is None else f"{gpus} x {used.name}" if gpus > 1 else used.name,
        gpu_bytes=0 if used is None else used.total_bytes,
        driver="" if used is None else used.driver,
    )


def read_software(package: Path = Path(rollplex.__file__).parent) -> Software:
    """What runs here.

    Args:
        package: a folder of the checkout; tests give their own.
    """
    commit, changes = _checkout(package)
    return Software(
        rollplex=rollplex.__version__,
        python=platform.python_version(),
        packages={name: importlib.metadata.version(name) for name in PACKAGES} | _installed(OPTIONAL),
        commit=commit,
        changes=changes,
    )


def _installed(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class OtherPrograms:
    """How many processors other programs keep busy while the block runs; the children of this process do not count."""

    cpus: float = 0.0

    def __enter__(self) -> Self:
        self._start = (time.monotonic(), _busy_s(), _own_s())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wall, busy, own = (
            now - was for now, was in zip((time.monotonic(), _busy_s(), _own_s()), self._start, strict=True)
        )
        self.cpus = max(0.0, busy - own) / wall if wall else 0.0


def _busy_s() -> float:
    """Seconds that all processors together have not been idle, since the system's start; 0 if it does not say."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _idle, _wait, interrupts, soft, _steal = (int(field) for field in fields)
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Seconds of processor time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _checkout(package: Path) -> tuple[str, str]:
    """Commit and digest of changes, if the package's own files are kept by git; else two empty texts."""
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return "", ""
    commit = _git(package, "rev-parse", "HEAD") or b""
    top = (_git(package, "rev-parse", "--show-toplevel") or b".").decode(errors="surrogateescape").strip()
    new = _git(Path(top), "ls-files", "--others", "--exclude-standard", "--", "*.py") or b""
    changes = (_git(Path(top), "diff", "HEAD", "--binary") or b"") + new
    return commit.decode(errors="replace").strip(), hashlib.sha256(changes).hexdigest()[:12] if changes else ""


def _git(folder: Path, *arguments: str) -> bytes | None:
    """What git prints; None if it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            check=False,
            timeout=_GIT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
