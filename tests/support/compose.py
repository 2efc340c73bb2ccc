"""Drives the four containers of compose.yaml as a user would: the command line, HTTP on the published port."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("coordinator", "prefix", "rollout", "trainer")
WORKERS = SERVICES[1:]
LOCAL_BASE = "base:bookworm"
"""Taken as base image where it is there; else compose.yaml's default."""
DEFAULT_BASE = "python:3.11-slim-bookworm"
TAG = "test"
QUICK_S = 30.0


def command_output(*command: str, deadline_s: float = QUICK_S, env: Mapping[str, str] | None = None) -> str:
    """The standard output of a command that must succeed."""
    everything = {**os.environ, **(env or {})}
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=everything, capture_output=True, text=True, timeout=deadline_s
    )
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def succeeds(*command: str, deadline_s: float = QUICK_S) -> bool:
    """Whether a command is there and ends with 0 in time."""
    try:
        return subprocess.run(command, check=False, capture_output=True, timeout=deadline_s).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def find_compose() -> tuple[str, ...] | None:
    """The command of Compose, of whichever version."""
    for command in (("docker", "compose"), ("docker-compose",)):
        if succeeds(*command, "version"):
            return command
    return None


def base_image() -> str:
    """The base image for the tests; skips where it is neither there nor to be had."""
    base = os.environ.get("ROLLPLEX_BASE")
    if not base:
        base = LOCAL_BASE if succeeds("docker", "image", "inspect", LOCAL_BASE) else DEFAULT_BASE
    if not succeeds("docker", "image", "inspect", base) and not succeeds("docker", "pull", base, deadline_s=120):
        pytest.skip(f"the base image {base} is not here and cannot be pulled")
    return base


@dataclass(frozen=True)
class Node:
    """One Compose project."""

    compose: tuple[str, ...]
    name: str
    env: Mapping[str, str]

    def run(self, *arguments: str, deadline_s: float = QUICK_S) -> str:
        """`docker compose ARGUMENTS` for this project; its standard output."""
        command = (*self.compose, "--project-name", self.name, *arguments)
        return command_output(*command, deadline_s=deadline_s, env=self.env)

    def inside(self, service: str, *command: str) -> str:
        """The output of a command in a running container."""
        return self.run("exec", "-T", service, *command)

    def inspect(self, service: str) -> dict[str, Any]:
        """What the engine knows of a container, a stopped one too."""
        container = command_output(
            *("docker", "ps", "--all", "--quiet"),
            *self._filter(),
            f"--filter=label=com.docker.compose.service={service}",
        )
        found: list[dict[str, Any]] = json.loads(command_output("docker", "inspect", *container.split()))
        assert len(found) == 1, f"{service}: {len(found)} containers"
        return found[0]

    def exit_codes(self) -> dict[str, int | None]:
        """By service; None for one that runs."""
        states = {service: self.inspect(service)["State"] for service in SERVICES}
        return {service: None if state["Running"] else state["ExitCode"] for service, state in states.items()}

    def api(self) -> httpx.Client:
        """A client of the control API on the published port, with the run's token."""
        address = self.run("port", "coordinator", "8765").strip()
        self.until(lambda: self._answers(address), "an API", 120)
        token = self.inside("coordinator", "cat", "/run/rollplex/token").strip()
        return httpx.Client(base_url=f"http://{address}", headers={"Authorization": f"Bearer {token}"}, timeout=60)

    def until(self, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        """Wait for something the containers do."""
        end = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end, f"no {what} within {deadline_s} s:\n{self.run('logs')}"
            time.sleep(0.2)

    def left(self) -> dict[str, list[str]]:
        """Ids of what the engine still has of this project."""
        return {
            "containers": command_output("docker", "ps", "--all", "--quiet", *self._filter()).split(),
            "volumes": command_output("docker", "volume", "ls", "--quiet", *self._filter()).split(),
            "networks": command_output("docker", "network", "ls", "--quiet", *self._filter()).split(),
        }

    def _filter(self) -> tuple[str, ...]:
        return (f"--filter=label=com.docker.compose.project={self.name}",)

    @staticmethod
    def _answers(address: str) -> bool:
        try:
            return httpx.get(f"http://{address}/healthz", timeout=5).status_code in {200, 503}
        except httpx.TransportError:
            return False
