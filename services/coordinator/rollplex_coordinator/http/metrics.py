"""The run's metrics in Prometheus' text format, from three sources.

    journal           events counted as they are read, at most MAX_EVENTS per scrape; also those of earlier processes
                      of the run, so that counters go on after a restart
    core              status, ledger and services at the moment of the scrape; left out if the core does not answer
    this process      HTTP requests, CPU time, memory, open files

Owns names and units (base units, `_total` for counters). A registry of its own: nothing is shared with a library.
Callable from any thread; one scrape at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollplex.errors import JournalError, WaitError
from rollplex.journal.events import (
    ErrorRaised,
    EvalDone,
    Event,
    GroupFinished,
    IterationDone,
    UnitDone,
    UpdateCommitted,
    WorkersRestarting,
)
from rollplex.journal.phases import Phase
from rollplex.journal.reader import Reader
from rollplex_coordinator.http.control import Control
from rollplex_coordinator.http.views import LedgerView, ServiceView, StatusView

CONTENT_TYPE = CONTENT_TYPE_LATEST
MAX_EVENTS = 20_000
_BATCH = 1_000
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_READ = {
    kind.__name__
    for kind in (UnitDone, GroupFinished, UpdateCommitted, IterationDone, EvalDone, ErrorRaised, WorkersRestarting)
}
Families: TypeAlias = Iterator[Metric]


class Snapshot(Struct, frozen=True, kw_only=True):
    """What the core said at one scrape."""

    status: StatusView
    ledger: LedgerView
    services: tuple[ServiceView, ...]


class Metrics:
    """The metrics of one run."""

    def __init__(self, journal_path: Path) -> None:
        self._journal_path = journal_path
        self._scrape = threading.Lock()
        registry = self._registry = CollectorRegistry()
        self._tally = _Tally(registry)
        self._core = _Core()
        registry.register(self._core)
        ProcessCollector(registry=registry)
        self._requests = Counter(
            "rollplex_http_requests", "Answered HTTP requests.", ["method", "status"], registry=registry
        )
        self._unread = Gauge(
            "rollplex_journal_unread_events", "Events that the counters do not have yet.", registry=registry
        )
        self._readable = Gauge("rollplex_journal_readable", "1: the journal can be read.", registry=registry)

    def count_request(self, method: str, status: int) -> None:
        """One HTTP request was answered."""
        known = method if method in {"GET", "POST", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"} else "other"
        self._requests.labels(known, str(status)).inc()

    def render(self, control: Control) -> bytes:
        """All metrics now. What cannot be asked is left out, and a gauge says so."""
        with self._scrape:
            self._count_events()
            self._core.snapshot = _ask(control)
            return generate_latest(self._registry)

    def _count_events(self) -> None:
        try:
            with Reader(self._journal_path) as reader:
                for _ in range(MAX_EVENTS // _BATCH):
                    rows = reader.rows_after(self._tally.read_to, _BATCH)
                    for row in rows:
                        self._tally.count(row.id, row.type, row.record().event if row.type in _READ else None)
                    if not rows:
                        break
                self._unread.set(reader.last_id() - self._tally.read_to)
        except JournalError:
            self._readable.set(0)
        else:
            self._readable.set(1)


def _ask(control: Control) -> Snapshot | None:
    try:
        return Snapshot(status=control.status(), ledger=control.ledger(), services=control.services())
    except WaitError:
        return None


class _Tally:
    """Counters over the journal. `read_to`: id of the last event that is in them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.read_to = 0
        self._events = Counter("rollplex_events", "Events in the journal.", ["type"], registry=registry)
        self._errors = Counter("rollplex_errors", "Errors in the journal.", ["kind"], registry=registry)
        self._restarts = Counter(
            "rollplex_restarts", "Restarts of all workers, by whose end was the reason.", ["role"], registry=registry
        )
        self._units = Histogram(
            "rollplex_unit_seconds", "Duration of units of work.", ["kind"], buckets=_SECONDS, registry=registry
        )
        self._vision = Counter(
            "rollplex_vision_prompts", "Prompts through the vision tower.", ["kind"], registry=registry
        )
        self._responses = Counter("rollplex_responses", "Sampled responses.", registry=registry)
        self._tokens = Counter("rollplex_response_tokens", "Sampled tokens.", registry=registry)
        self._updates = Histogram(
            "rollplex_update_seconds", "Duration of optimizer steps.", buckets=_SECONDS, registry=registry
        )
        self._iteration = Gauge(
            "rollplex_iteration_metric", "A metric of the last iteration.", ["name"], registry=registry
        )
        self._evaluation = Gauge(
            "rollplex_eval_metric", "A metric of the last evaluation.", ["eval", "name"], registry=registry
        )

    def count(self, event_id: int, kind: str, event: Event | None) -> None:
        """One event; `event` is None for types of which only the number counts."""
        self.read_to = event_id
        self._events.labels(kind).inc()
        match event:
            case UnitDone():
                self._units.labels(event.kind).observe(event.end_s - event.start_s)
                self._vision.labels(event.kind).inc(event.vision_prompts)
            case GroupFinished():
                self._responses.inc(len(event.lengths))
                self._tokens.inc(sum(event.lengths))
            case UpdateCommitted():
                self._updates.observe(event.end_s - event.start_s)
            case IterationDone():
                for name, value in event.metrics.items():
                    self._iteration.labels(name).set(float("nan") if value is None else value)
            case EvalDone():
                for name, value in event.metrics.items():
                    self._evaluation.labels(event.name, name).set(float("nan") if value is None else value)
            case ErrorRaised():
                self._errors.labels(event.error.kind).inc()
            case WorkersRestarting():
                self._restarts.labels("mps" if event.role is None else event.role).inc()
            case _:
                pass


class _Core(Collector):
    """Gauges from the last snapshot."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None

    def collect(self) -> Families:
        yield _gauge("rollplex_core_answers", "1: the core answered this scrape.", self.snapshot is not None)
        if self.snapshot is not None:
            yield from _of_status(self.snapshot.status)
            yield from _of_ledger(self.snapshot.ledger)
            yield from _of_services(self.snapshot.services)


def _of_status(status: StatusView) -> Families:
    yield _table(
        "rollplex_run_info", "The run: a constant 1.", ["run", "schedule"], [((status.run, status.schedule), 1)]
    )
    phases = [((phase.name,), float(phase.name == status.phase)) for phase in Phase]
    yield _table("rollplex_phase", "1: the run is in this phase.", ["phase"], phases)
    yield _gauge("rollplex_step", "The present iteration.", status.step)
    yield _gauge("rollplex_weights_version", "Committed updates.", status.version)
    yield _gauge("rollplex_iterations_wanted", "Iterations asked for.", status.iterations_wanted)
    yield _gauge("rollplex_iterations_done", "Iterations finished.", status.iterations_done)
    yield _gauge("rollplex_start_time_seconds", "When the coordinator started.", status.started_wall_s)
    yield _gauge("rollplex_waits", "What the coordinator waits for.", len(status.waiting))
    oldest = max((wait.age_s for wait in status.waiting), default=0.0)
    yield _gauge("rollplex_oldest_wait_seconds", "Age of the oldest wait.", oldest)
    working = [((item.name,), float(item.state != "failed")) for item in status.trackers]
    yield _table("rollplex_tracker_up", "1: the tracker has not failed.", ["tracker"], working)
    dropped = [((item.name,), float(item.dropped_rows)) for item in status.trackers]
    yield _table("rollplex_tracker_dropped_rows", "Rows that it did not keep up with.", ["tracker"], dropped)


def _of_ledger(ledger: LedgerView) -> Families:
    for name, text, values in (
        ("budget", "Budget", [(x.device, x.budget_bytes) for x in ledger.devices]),
        ("leased", "Leased", [(x.device, x.leased_bytes) for x in ledger.devices]),
        ("reserved", "Set aside for leases to come", [(x.device, x.reserved_bytes) for x in ledger.devices]),
        ("peak", "Most leased at once", [(x.device, x.peak_bytes) for x in ledger.devices]),
    ):
        yield _table(f"rollplex_{name}_bytes", f"{text}.", ["device"], [((device,), n) for device, n in values])
    labels = ["device", "kind", "owner"]
    leased: dict[tuple[str, ...], float] = {}
    held: dict[tuple[str, ...], float] = {}
    for lease in ledger.leases:
        key = (lease.device, str(lease.kind), lease.owner)
        leased[key] = leased.get(key, 0) + lease.size_bytes
        if lease.held_bytes is not None:
            held[key] = held.get(key, 0) + lease.held_bytes
    yield _table("rollplex_lease_bytes", "Leased, by kind and owner.", labels, list(leased.items()))
    yield _table("rollplex_held_bytes", "Held under leases, as measured.", labels, list(held.items()))
    yield _gauge("rollplex_lease_requests_waiting", "Requests that wait for memory.", len(ledger.waiting))


def _of_services(services: tuple[ServiceView, ...]) -> Families:
    up = [((x.service, str(x.role), x.device), float(x.state in {"ready", "busy"})) for x in services]
    yield _table("rollplex_service_up", "1: the service is ready.", ["service", "role", "device"], up)
    incarnations = [((x.service,), float(x.incarnation)) for x in services]
    yield _table("rollplex_service_incarnation", "How often it was started.", ["service"], incarnations)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _table(name: str, text: str, labels: list[str], rows: Sequence[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(list(values), value)
    return family
