"""What the terminal shows of a run that goes well, and of one that teaches nothing."""

from __future__ import annotations

import pytest

from rollplex_coordinator.progress import MANY, Progress


def row(**changes: float) -> dict[str, object]:
    return {"reward": 0.25, "time/step_s": 0.1, "time/prefix_in_window": 0.5, "updated": 1.0, **changes}


def test_an_iteration_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Progress().iteration(3, 10, row())
    assert capsys.readouterr().err == "iteration 3/10  reward 0.250  0.10 s  50% of prefix time hidden\n"


def test_lines_come_at_most_once_a_second_but_the_last_one_always(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    for done in range(1, 6):
        progress.iteration(done, 5, row())
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["1/5", "5/5"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"groups": 4.0, "groups_skipped": 4.0, "skipped_groups": 4.0}, "a reward function failed"),
        ({"groups": 4.0, "groups_skipped": 4.0, "skipped_groups": 0.0}, "returned None for every sample"),
        ({"groups": 4.0, "groups_skipped": 1.0}, "not finite"),
    ],
)
def test_an_iteration_without_update_is_always_told_and_why(
    capsys: pytest.CaptureFixture[str], changes: dict[str, float], why: str
) -> None:
    progress = Progress()
    for done in (1, 2):
        progress.iteration(done, 9, row(updated=0.0, **changes))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("no update" in line and why in line for line in lines)


def test_equal_rewards_in_every_group_are_warned_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    for done in range(2 * MANY):
        progress.iteration(done, 1000, row(frac_reward_zero_std=1.0))
    assert capsys.readouterr().err.count("warning:") == 1
    for done in range(2 * MANY):
        progress.iteration(done, 1000, row(frac_reward_zero_std=float(done % 2)))
    assert "warning:" not in capsys.readouterr().err
