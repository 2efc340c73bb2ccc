"""From what a coordinator tells to what is shown, and the pace of iterations."""

from __future__ import annotations

from rollplex.protocol.common import Role
from rollplex.terminal.pace import KEPT, Pace
from rollplex.terminal.view import assemble, evaluation
from rollplex_coordinator.http.views import BudgetView, ServiceView, StatusView, WaitView


def status(*ages_s: float) -> StatusView:
    return StatusView(
        run="r1",
        phase="TRAIN",
        step=4,
        version=4,
        iterations_wanted=10,
        iterations_done=4,
        schedule="stream",
        started_wall_s=1_000.0,
        waiting=tuple(
            WaitView(awaited=f"unit {age}", source="trainer[0:0]", age_s=age, since_wall_s=0.0, deadline_s=60.0)
            for age in ages_s
        ),
    )


def test_a_view_has_what_the_coordinator_tells_and_the_time_that_is_left() -> None:
    pace = Pace()
    pace.add({"reward": 0.5, "time/step_s": 2.0, "time/prefix_in_window": 0.25})
    view = assemble(
        status(),
        [BudgetView(device="0:0", budget_bytes=100, leased_bytes=60, peak_bytes=80)],
        [ServiceView(service="x", role=Role.PREFIX, device="0:0", incarnation=1, pid=1, state="busy")],
        pace=pace,
        evaluations=[],
        now_wall_s=1_030.0,
    )
    assert (view.run, view.phase, view.schedule, view.version) == ("r1", "TRAIN", "stream", 4)
    assert (view.done, view.wanted, view.elapsed_s, view.left_s) == (4, 10, 30.0, 12.0)
    assert (view.reward, view.hidden) == (0.5, 0.25)
    assert [(m.device, m.leased_bytes, m.budget_bytes, m.peak_bytes) for m in view.memory] == [("0:0", 60, 100, 80)]
    assert view.services == (("prefix", "busy"),)


def test_processes_of_one_role_are_told_apart_by_their_device() -> None:
    services = [
        ServiceView(service="x", role=role, device=device, incarnation=1, pid=1, state="ready")
        for role, device in ((Role.PREFIX, "0:0"), (Role.PREFIX, "0:1"), (Role.INPUT, "0:0"))
    ]
    view = assemble(status(), (), services, pace=Pace(), evaluations=[], now_wall_s=0.0)
    assert [name for name, _ in view.services] == ["prefix[0:0]", "prefix[0:1]", "input"]


def test_a_wait_is_shown_only_when_it_is_older_than_work_usually_takes() -> None:
    view = assemble(status(0.2, 1.5, 0.99), (), (), pace=Pace(), evaluations=[], now_wall_s=0.0)
    assert [wait.what for wait in view.waits] == ["unit 1.5"]
    assert view.elapsed_s == 0.0


def test_of_an_evaluation_rewards_are_shown_under_short_names() -> None:
    shown = evaluation("held_out", 7, {"reward": 0.5, "count": 9.0, "rewards/right/mean": 0.25, "rewards/x/mean": None})
    assert (shown.name, shown.step, shown.values) == ("held_out", 7, (("reward", 0.5), ("right", 0.25)))


def test_timings_are_the_last_and_the_median_of_the_last_iterations() -> None:
    pace = Pace()
    for seconds in (100.0, *([1.0] * (KEPT // 2)), *([3.0] * (KEPT // 2))):
        pace.add({"time/step_s": seconds, "time/train_s": seconds / 2, "reward": None})
    assert [(t.name, t.last_s, t.median_s) for t in pace.timings] == [("iteration", 3.0, 2.0), ("train", 1.5, 1.0)]
    assert pace.reward is None
    assert pace.left_s(10) == 20.0
    assert pace.left_s(0) is None


def test_before_the_first_iteration_nothing_is_known() -> None:
    pace = Pace()
    assert (pace.reward, pace.hidden, pace.timings, pace.left_s(5)) == (None, None, (), None)
