"""Containers: told if they are there. Nothing of them is needed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

from rollplex.cli.doctor.finding import Finding, note, ok

ASK_S = 10.0


def check() -> Iterator[Finding]:
    """Docker and compose."""
    yield _docker()


def _docker() -> Finding:
    docker = shutil.which("docker")
    if docker is None:
        return ok("docker", "not installed (only `docker compose up` needs it)")
    engine = said([docker, "version", "--format", "{{.Server.Version}}"])
    compose = said([docker, "compose", "version", "--short"])
    if not engine:
        return note("docker", "installed, but no engine answers", "Start it, if you want to use containers.")
    return ok("docker", f"engine {engine}, compose {compose or 'not installed'}")


def said(command: list[str]) -> str | None:
    """What a program says within the deadline; None if it fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=ASK_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
