"""Iterations as the API shows them, read back from the journal. Pure: records in, view out."""

from __future__ import annotations

from collections.abc import Sequence

from rollplex.journal.events import (
    GroupFinished,
    GroupSkipped,
    IterationDone,
    IterationStarted,
    PhaseEntered,
    Record,
    UpdateCommitted,
    UpdateSkipped,
)
from rollplex_coordinator.http.views import IterationView


def iteration_view(records: Sequence[Record]) -> IterationView | None:
    """The view of one step from its records, in order; None if it has not started."""
    view: IterationView | None = None
    phases: dict[str, float] = {}
    previous: tuple[str, float] | None = None
    changes: dict[str, object] = {}
    finished = skipped = 0
    started_s = 0.0
    for record in records:
        match event := record.event:
            case IterationStarted():
                started_s, finished, skipped, previous = record.monotonic_s, 0, 0, None
                changes.clear()
                phases.clear()
                view = IterationView(
                    step=event.step,
                    state="running",
                    version=event.version,
                    rows=event.rows,
                    started_wall_s=record.wall_s,
                )
            case PhaseEntered():
                if previous is not None:
                    phases[previous[0]] = phases.get(previous[0], 0.0) + event.start_s - previous[1]
                previous = (event.phase, event.start_s)
            case GroupFinished():
                finished += 1
            case GroupSkipped():
                skipped += 1
            case UpdateCommitted():
                changes |= {"state": "committed", "version_after": event.version}
            case UpdateSkipped():
                changes |= {"state": "skipped", "version_after": event.version}
            case IterationDone() if view is not None:
                changes.setdefault("state", "ended")
                changes |= {"metrics": event.metrics, "duration_s": record.monotonic_s - started_s}
            case _:
                pass
    if view is None:
        return None
    changes |= {"phases_s": phases, "groups_finished": finished, "groups_skipped": skipped}
    return IterationView.model_validate(view.model_dump() | changes)
