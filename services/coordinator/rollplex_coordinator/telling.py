"""How the end of a run is told: exit code, one paragraph for the user, one event for the journal. Decides nothing."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec.structs import replace

from rollplex.errors import BudgetError, ConfigError, RollplexError
from rollplex.journal.events import ErrorRaised
from rollplex.protocol.common import Device, Role
from rollplex.worker.runtime import report
from rollplex_coordinator.decisions.fleet import DEVICE
from rollplex_coordinator.decisions.gpu_fault import group_note, is_gpu_fault
from rollplex_coordinator.processes.environment import WORKERS
from rollplex_coordinator.processes.gpus import Gpus
from rollplex_coordinator.processes.link import WorkerDied, WorkerFailed
from rollplex_coordinator.processes.mps import Mps
from rollplex_coordinator.processes.supervisor import Supervisor
from rollplex_coordinator.records.record import Record
from rollplex_coordinator.steps.orders import span

EXIT_ERROR = 1
EXIT_CONFIG = 2
TAIL_BYTES = 4096
"""Of a log, in which a death of the GPU is looked for."""


def exit_code(error: RollplexError) -> int:
    """2 for what another configuration would mend, also when a child found it; else 1."""
    kind = error.report.kind if isinstance(error, WorkerFailed) else type(error).__name__
    return EXIT_CONFIG if kind in {ConfigError.__name__, BudgetError.__name__} else EXIT_ERROR


def told(
    error: RollplexError, record: Record, supervisor: Supervisor, gpus: Gpus | None = None, *, logs_stay: bool = True
) -> tuple[ErrorRaised, str]:
    """Who, where in the run, what, and which log (unless it goes with the run): for the journal, and in words.

    Args:
        gpus: those of the run; None: host memory.
    """
    service, role, device = place_of(error)
    details = error.report if isinstance(error, WorkerFailed) else report(error)
    mps = None if gpus is None or role is None or role not in WORKERS else gpus.daemon(device)
    log_text = "" if role is None else supervisor.log_text(role, device)
    note = "" if mps is None or role is None else _gpu_note(role, str(error), log_text, mps)
    log_path = log_text if logs_stay else ""
    details = replace(details, do=f"{details.do} {note}".strip()) if note else details
    groups = record.open_groups
    event = ErrorRaised(
        error=details,
        phase=record.phase.name,
        step=record.step,
        service=service[:4_000],
        group=groups[0] if groups else None,
        log_path=log_path,
    )
    place = f"phase {record.phase.name}"
    place += "" if record.step is None else f", step {record.step}"
    place += f", group {span(groups)} not trained yet" if groups else ""
    by = f"{service} reported " if isinstance(error, WorkerFailed) else ""
    more = "".join(f"\n  {line}" for line in (note, f"log: {log_path}" if log_path else "") if line)
    return event, f"error: {by}{details.kind} in {place}: {error}{more}"


def place_of(error: RollplexError) -> tuple[str, Role | None, Device]:
    """Which process an error is of: in words, its role (None: of no process that said so), its device."""
    if isinstance(error, WorkerFailed):
        return str(error.peer), error.peer.role, error.peer.device
    if isinstance(error, WorkerDied):
        return error.where, error.role, error.device
    return error.where, None, DEVICE


def _gpu_note(role: Role, text: str, log_path: str, mps: Mps) -> str:
    """What is to be said of a fault of the GPU, if it was one: by the error, or by the end of the worker's log."""
    if not is_gpu_fault(text) and not is_gpu_fault(_end_of(log_path)):
        return ""
    return group_note(role, WORKERS - {role}, daemon_alive=mps.alive)


def _end_of(log_path: str) -> str:
    """The last lines of a log; empty where there is none."""
    if not log_path:
        return ""
    try:
        with Path(log_path).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
