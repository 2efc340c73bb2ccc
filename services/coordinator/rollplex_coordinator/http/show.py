"""Turns what the core and the journal know into views. Pure.

Owns the mapping only: nothing here asks, waits or remembers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Literal

from rollplex_coordinator import leases
from rollplex_coordinator.events import (
    GroupFinished,
    GroupSkipped,
    IterationDone,
    IterationStarted,
    PhaseEntered,
    Record,
    UpdateCommitted,
    UpdateSkipped,
)
from rollplex_coordinator.http.views import (
    BudgetView,
    IterationView,
    LeaseRequestView,
    LeaseView,
    LedgerView,
    ReservationView,
)
from rollplex_coordinator.journal_reader import Reader


def ledger_view(picture: leases.LedgerView, measured_bytes: Mapping[int, int]) -> LedgerView:
    """The ledger's picture of itself, with what was measured under each lease."""
    return LedgerView(
        phase=picture.phase,
        devices=tuple(_budget(device) for device in picture.devices),
        leases=tuple(_lease(x, measured_bytes.get(x.id)) for device in picture.devices for x in device.leases),
        waiting=tuple(_request(x) for device in picture.devices for x in device.waiting),
    )


def iteration_view(records: Iterable[Record]) -> IterationView | None:
    """One iteration from the journal's events of its step; None if it was never started.

    An iteration that was begun again (after a crash, or a stop in its middle) is shown as it went the last time.
    Durations are from CLOCK_MONOTONIC.
    """
    run: list[Record] = []
    for record in records:
        if isinstance(record.event, IterationStarted):
            run = []
        run.append(record)
    if not run or not isinstance(run[0].event, IterationStarted):
        return None
    started = run[0].event
    committed = next((r.event for r in run if isinstance(r.event, UpdateCommitted)), None)
    done = next((r for r in run if isinstance(r.event, IterationDone)), None)
    return IterationView(
        step=started.step,
        state=_state(run, over=done is not None),
        version=started.version,
        version_after=committed.version if committed else None,
        rows=started.rows,
        started_wall_s=run[0].wall_s,
        duration_s=done.monotonic_s - run[0].monotonic_s if done else None,
        phases_s=_phases(run, done.monotonic_s if done else None),
        groups_finished=sum(isinstance(r.event, GroupFinished) for r in run),
        groups_skipped=sum(isinstance(r.event, GroupSkipped) for r in run),
        metrics=done.event.metrics if done and isinstance(done.event, IterationDone) else {},
    )


def iteration_views(reader: Reader, first: int, limit: int) -> tuple[IterationView, ...]:
    """At most `limit` iterations from step `first` on, in order.

    Raises:
        JournalError: the journal cannot be read.
    """
    views = (iteration_view(reader.events_of_step(step)) for step in reader.steps(first, limit))
    return tuple(view for view in views if view is not None)


def _state(run: list[Record], *, over: bool) -> Literal["running", "committed", "skipped", "ended"]:
    kinds = {type(record.event) for record in run}
    if UpdateCommitted in kinds:
        return "committed"
    if UpdateSkipped in kinds:
        return "skipped"
    return "ended" if over else "running"


def _phases(run: list[Record], end_s: float | None) -> dict[str, float]:
    entries = [(r.event.phase, r.event.start_s) for r in run if isinstance(r.event, PhaseEntered)]
    if end_s is not None:
        entries.append(("", end_s))
    seconds: dict[str, float] = {}
    for (phase, start_s), (_, stop_s) in pairwise(entries):
        seconds[phase] = seconds.get(phase, 0.0) + max(0.0, stop_s - start_s)
    return seconds


def _budget(device: leases.DeviceView) -> BudgetView:
    return BudgetView(
        device=str(device.device),
        budget_bytes=device.budget_bytes,
        held_bytes=device.held_bytes,
        reserved_bytes=device.reserved_bytes,
        free_bytes=device.free_bytes,
        peak_bytes=device.peak_bytes,
        reservations=tuple(
            ReservationView(name=r.name, size_bytes=r.size_bytes, drawn_bytes=r.drawn_bytes, phases=r.phases)
            for r in device.reservations
        ),
    )


def _lease(lease: leases.Lease, measured_bytes: int | None) -> LeaseView:
    return LeaseView(
        lease=lease.id,
        kind=lease.kind,
        owner=lease.producer,
        purpose=lease.purpose,
        device=str(lease.device),
        size_bytes=lease.size_bytes,
        measured_bytes=measured_bytes,
        segment=lease.segment,
        last_consumer=lease.last_consumer,
        last_phase=lease.last.name,
    )


def _request(pending: leases.Pending) -> LeaseRequestView:
    return LeaseRequestView(
        owner=pending.producer,
        device=str(pending.device),
        size_bytes=sum(block.size_bytes for block in pending.blocks),
        purposes=tuple(block.purpose for block in pending.blocks),
        last_phase=max(block.last for block in pending.blocks).name,
    )
