"""GPUs and containers: told if they are there. Nothing of them is needed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from rollplex.cli.doctor.finding import Finding, note, ok

ASK_S = 10.0


def check(root: Path = Path("/")) -> Iterator[Finding]:
    """GPU, Docker and compose. `root`: where proc/ is; tests make their own."""
    yield _gpu(root)
    yield _docker()


def _gpu(root: Path) -> Finding:
    try:
        driver = (root / "proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        driver = ""
    smi = shutil.which("nvidia-smi")
    found = _said([smi, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]) if smi else None
    if found:
        return ok("gpu", "; ".join(found.splitlines()))
    if driver:
        return note("gpu", driver, "nvidia-smi does not list a GPU: runs use host memory.")
    return ok("gpu", "none: host memory only")


def _docker() -> Finding:
    docker = shutil.which("docker")
    if docker is None:
        return ok("docker", "not installed (only `docker compose up` needs it)")
    engine = _said([docker, "version", "--format", "{{.Server.Version}}"])
    compose = _said([docker, "compose", "version", "--short"])
    if not engine:
        return note("docker", "installed, but no engine answers", "Start it, if you want to use containers.")
    return ok("docker", f"engine {engine}, compose {compose or 'not installed'}")


def _said(command: list[str]) -> str | None:
    """What a program says within the deadline; None if it fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=ASK_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
