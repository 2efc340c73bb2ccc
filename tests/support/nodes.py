"""Running nodes for end-to-end tests: real processes, watched from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx

from rollplex.journal.events import Record
from rollplex.journal.reader import Reader

NODE_DEADLINE_S = 100.0
EventT = TypeVar("EventT")


@dataclass(frozen=True)
class Project:
    """A small dataset, a model, and a configuration over them."""

    folder: Path
    config: Path


@dataclass
class Finished:
    """A node that has ended."""

    run_dir: Path
    code: int
    stderr: str
    seconds: float
    records: list[Record] = field(default_factory=list)

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    @property
    def evals(self) -> list[dict[str, float | str]]:
        return [json.loads(line) for line in (self.run_dir / "eval.jsonl").read_text().splitlines()]

    def of(self, kind: type[EventT]) -> list[EventT]:
        return [record.event for record in self.records if isinstance(record.event, kind)]

    def checkpoint(self) -> dict[str, bytes]:
        """Every file of the newest checkpoint that holds tensors."""
        folder = max((self.run_dir / "checkpoints").glob("step_*"), key=lambda p: int(p.name.split("_")[1]))
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.safetensors"))}


class Node:
    """A node that runs."""

    def __init__(self, command: Sequence[str], run_dir: Path, env: dict[str, str] | None = None) -> None:
        self.run_dir = run_dir
        self.started_s = time.monotonic()
        self._stderr_path = run_dir.with_name(f"{run_dir.name}.{time.monotonic_ns()}.stderr")
        with self._stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    @property
    def stderr(self) -> str:
        return self._stderr_path.read_text(encoding="utf-8", errors="replace")

    def wait(self, deadline_s: float = NODE_DEADLINE_S) -> Finished:
        """Until it ends by itself."""
        code = self.process.wait(timeout=deadline_s)
        seconds = time.monotonic() - self.started_s
        records: list[Record] = []
        journal = self.run_dir / "journal.sqlite"
        if journal.exists():
            with Reader(journal) as reader:
                while more := reader.events_after(records[-1].id if records else 0, 5000):
                    records += more
        return Finished(self.run_dir, code, self.stderr, seconds, records)

    def api(self) -> httpx.Client:
        """A client of its control API with its token."""
        self.until(lambda: (self.run_dir / "http.json").exists() and (self.run_dir / "token").exists(), "the API")
        url = json.loads((self.run_dir / "http.json").read_text())["url"]
        token = (self.run_dir / "token").read_text().strip()
        return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=20)

    def until(self, condition: Callable[[], bool], what: str, deadline_s: float = NODE_DEADLINE_S) -> None:
        """Wait for something the node does."""
        end = time.monotonic() + deadline_s
        while not condition():
            assert self.process.poll() is None, f"the node ended before {what}:\n{self.stderr}"
            assert time.monotonic() < end, f"no {what} within {deadline_s} s:\n{self.stderr}"
            time.sleep(0.02)

    def until_iterations(self, count: int) -> None:
        """Until metrics.jsonl has that many lines."""
        path = self.run_dir / "metrics.jsonl"
        self.until(lambda: path.exists() and path.read_bytes().count(b"\n") >= count, f"iteration {count}")

    def worker(self, role: str) -> int:
        """The pid that a worker itself last said: it computes there, whether it was started or forked."""
        found = re.findall(r"INFO pid (\d+) joined run", (self.run_dir / "logs" / f"{role}.log").read_text())
        assert found, f"no {role} has joined:\n{self.stderr}"
        return int(found[-1])

    def pids(self) -> dict[str, int]:
        """Every process of the run by role, from the processes' command lines."""
        return {role: pid for pid, role in run_processes(self.run_dir)}


def run_processes(run_dir: Path) -> list[tuple[int, str]]:
    """(pid, role) of every live process that was started with this run directory."""
    modules = {
        "rollplex_rollout": "rollout",
        "rollplex_prefix": "prefix",
        "rollplex_trainer": "trainer",
        "rollplex.data": "input",
        "rollplex.rewards": "reward",
        "rollplex_coordinator": "coordinator",
    }
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(run_dir) in words and state not in "ZX":
            role = next((role for module, role in modules.items() if module in words), "other")
            found.append((int(entry.name), role))
    return found


def end_all(nodes: Sequence[Node]) -> None:
    """Kill whatever is left of these nodes."""
    for node in nodes:
        if node.process.poll() is None:
            node.process.kill()
            node.process.wait(10)
        for pid, _ in run_processes(node.run_dir):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def handles_terms(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process catches SIGTERM, as the kernel tells."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


Start = Callable[..., Node]
"""start(*arguments, overrides=..., run_dir=..., env=..., config=...) -> Node"""
