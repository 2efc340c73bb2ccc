"""An iteration as the API shows it, from the journal's records."""

from __future__ import annotations

from rollplex.journal.events import (
    Event,
    GroupFinished,
    GroupSkipped,
    IterationDone,
    IterationStarted,
    PhaseEntered,
    Record,
    UpdateCommitted,
    UpdateSkipped,
)
from rollplex_coordinator.http.history import iteration_view


def records(*events: Event) -> list[Record]:
    return [
        Record(id=n + 1, wall_s=100.0 + n, monotonic_s=float(n), step=3, event=event) for n, event in enumerate(events)
    ]


STARTED = IterationStarted(step=3, version=2, rows=(7, 9))
ROLLOUT = PhaseEntered(phase="ROLLOUT", start_s=10.0, step=3)
SCORE = PhaseEntered(phase="SCORE", start_s=12.5, step=3)
FINISHED = GroupFinished(step=3, group=0, row=7, lengths=(2,), end_s=11.0)


def test_a_step_that_has_not_started_has_no_view() -> None:
    assert iteration_view(records()) is None


def test_a_running_step_shows_what_is_over() -> None:
    view = iteration_view(records(STARTED, ROLLOUT, FINISHED, SCORE))
    assert view is not None
    assert (view.state, view.version, view.version_after, view.rows) == ("running", 2, None, (7, 9))
    assert view.phases_s == {"ROLLOUT": 2.5}
    assert (view.groups_finished, view.duration_s) == (1, None)


def test_a_committed_and_a_skipped_step_show_the_version_they_left() -> None:
    commit = UpdateCommitted(step=3, version=3, digest="d", start_s=0.0, end_s=1.0)
    done = IterationDone(step=3, version=3, metrics={"reward": 0.5, "kl": None})
    view = iteration_view(records(STARTED, ROLLOUT, commit, done))
    assert view is not None
    assert (view.state, view.version_after, view.duration_s) == ("committed", 3, 3.0)
    assert view.metrics == {"reward": 0.5, "kl": None}
    skip = UpdateSkipped(step=3, version=2, reason="not finite")
    lost = GroupSkipped(step=3, group=1, row=9, function="f", problem="raised")
    view = iteration_view(records(STARTED, lost, skip, done))
    assert view is not None
    assert (view.state, view.version_after, view.groups_skipped) == ("skipped", 2, 1)
