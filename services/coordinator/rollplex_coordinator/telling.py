"""How the end of a run is told: exit code, one paragraph for the user, one event for the journal. Decides nothing."""

from __future__ import annotations

import logging
import sys

from rollplex.errors import BudgetError, ConfigError, RollplexError
from rollplex.journal.events import ErrorRaised
from rollplex.worker.runtime import report
from rollplex_coordinator.processes.link import WorkerDied, WorkerFailed
from rollplex_coordinator.processes.supervisor import Supervisor
from rollplex_coordinator.records.record import Record
from rollplex_coordinator.steps.orders import span

EXIT_ERROR = 1
EXIT_CONFIG = 2


def say(text: str) -> None:
    """One line, or paragraph, on the terminal."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def log_to_terminal() -> None:
    """Log lines go to the standard error from now on, above the table where there is one."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", handlers=[_Lines()])


class _Lines(logging.Handler):
    """Asks for `sys.stderr` at each line: a table that is being drawn stands in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def exit_code(error: RollplexError) -> int:
    """2 for what another configuration would mend, also when a child found it; else 1."""
    kind = error.report.kind if isinstance(error, WorkerFailed) else type(error).__name__
    return EXIT_CONFIG if kind in {ConfigError.__name__, BudgetError.__name__} else EXIT_ERROR


def told(
    error: RollplexError, record: Record, supervisor: Supervisor, *, logs_stay: bool = True
) -> tuple[ErrorRaised, str]:
    """Who, where in the run, what, and which log (unless it goes with the run): for the journal, and in words."""
    service, role = error.where, None
    if isinstance(error, WorkerFailed):
        service, role = str(error.peer), error.peer.role
    elif isinstance(error, WorkerDied):
        role = error.role
    log_path = supervisor.log_text(role) if role is not None and logs_stay else ""
    details = error.report if isinstance(error, WorkerFailed) else report(error)
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
    return event, f"error: {by}{details.kind} in {place}: {error}" + (f"\n  log: {log_path}" if log_path else "")
