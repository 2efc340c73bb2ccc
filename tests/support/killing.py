"""Ends of workers at a chosen moment of a run.

A run is brought to a phase, and kept there, by a worker that is stopped while the node is idle; then one is killed.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import httpx

from support.nodes import Node

ROLES = ("rollout", "prefix", "trainer")
HOLDERS = {"ROLLOUT": "rollout", "SCORE": "prefix", "TRAIN": "trainer"}
"""Who keeps a run in a phase by doing nothing."""


class Driver:
    """Brings a node that serves to a phase, kills there, and waits until it has gone on."""

    def __init__(self, node: Node, api: httpx.Client) -> None:
        self.node, self.api = node, api
        self.expected: list[tuple[str, str]] = []
        self.leases: list[list[Any]] = []

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.api.get("/status").json()
        return found

    def idle(self) -> None:
        """Until nothing is to be done; notes who holds what."""
        self.node.until(
            lambda: (s := self.status())["phase"] == "IDLE" and s["iterations_done"] == s["iterations_wanted"],
            "idleness",
        )
        leases = self.api.get("/ledger").json()["leases"]
        self.leases.append(sorted([each["kind"], each["owner"], each["size_bytes"]] for each in leases))

    def send(self, role: str, number: signal.Signals) -> None:
        os.kill(self.node.worker(role), number)

    def begin(self) -> None:
        self.api.post("/iterations", json={"count": 1}).raise_for_status()

    def until_waiting(self, phase: str, holder: str) -> None:
        """Until the run is in a phase, and waits for nobody but a worker that is stopped."""

        def there() -> bool:
            found = self.status()
            return found["phase"] == phase and {w["from"] for w in found["waiting"]} == {f"{holder}[0:0]"}

        self.node.until(there, f"{phase}, waiting for {holder}")

    def ended(self, role: str, phase: str) -> None:
        """Until the workers are back and the run is idle."""
        self.expected.append((role, phase))
        expected = {"number": len(self.expected), "state": "done"}
        self.node.until(
            lambda: expected.items() <= (self.status()["restart"] or {}).items(), f"a restart after {role} in {phase}"
        )
        self.idle()

    def kill_in(self, phase: str, victim: str) -> None:
        self.send(HOLDERS.get(phase, "rollout"), signal.SIGSTOP)
        self.begin()
        self.until_waiting(phase, HOLDERS.get(phase, "rollout"))
        self.send(victim, signal.SIGKILL)
        self.ended(victim, phase)

    def kill_while_readers_drain(self) -> None:
        """After the votes, before BEGIN."""
        self.send("trainer", signal.SIGSTOP)
        self.begin()
        self.until_waiting("TRAIN", "trainer")
        self.send("rollout", signal.SIGSTOP)
        self.send("trainer", signal.SIGCONT)
        self.until_waiting("UPDATE", "rollout")
        self.send("rollout", signal.SIGKILL)
        self.ended("rollout", "UPDATE")

    def kill_when_idle(self, victim: str) -> None:
        self.send(victim, signal.SIGKILL)
        self.ended(victim, "IDLE")

    def kill_in_a_checkpoint(self) -> None:
        self.send("trainer", signal.SIGSTOP)
        self.api.post("/checkpoints", json={}).raise_for_status()
        self.until_waiting("CHECKPOINT", "trainer")
        self.send("trainer", signal.SIGKILL)
        self.ended("trainer", "CHECKPOINT")

    def hang(self, victim: str) -> None:
        self.send(victim, signal.SIGSTOP)
        self.begin()
        self.ended(victim, "ROLLOUT")
