"""What the terminal shows of a run that goes well, and of one that teaches nothing."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Iterator

import pytest

from rollplex.protocol.common import Role
from rollplex.terminal.screen import Screen
from rollplex_coordinator import progress as progress_module
from rollplex_coordinator import saying
from rollplex_coordinator.http.views import BudgetView, ServiceView, StatusView, WaitView
from rollplex_coordinator.progress import MANY, Progress, TableProgress, make_progress
from rollplex_coordinator.saying import log_to_terminal, say
from support.terminals import Terminal, lines_of


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


# --- on a terminal ------------------------------------------------------------------------------------------------


class Run:
    """What the coordinator would tell of itself."""

    def __init__(self) -> None:
        self.done = 0
        self.looks = 0

    def look(self) -> tuple[StatusView, tuple[BudgetView, ...], tuple[ServiceView, ...]]:
        self.looks += 1
        wait = WaitView(awaited="generate groups 0-3", source="rollout[0:0]", age_s=2.0, since_wall_s=0, deadline_s=60)
        status = StatusView(
            run="digits-1",
            phase="ROLLOUT",
            step=self.done,
            version=self.done,
            iterations_wanted=5,
            iterations_done=self.done,
            schedule="overlap",
            started_wall_s=0.0,
            waiting=(wait,),
        )
        memory = BudgetView(device="0:0", budget_bytes=2**30, leased_bytes=2**20, peak_bytes=2**20)
        service = ServiceView(service="s", role=Role.ROLLOUT, device="0:0", incarnation=1, pid=1, state="busy")
        return status, (memory,), (service,)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    with Terminal() as terminal:
        yield terminal


def test_on_a_terminal_iterations_are_a_table_and_all_else_is_lines_above_it(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    log_to_terminal()
    run = Run()
    progress = make_progress(terminal.stream, run.look)
    assert isinstance(progress, TableProgress)
    say("rollplex: run digits-1 in there")
    progress.turn()
    logging.getLogger("rollplex.test").warning("data train: 7 rows")
    progress.evaluation("held_out", 0, {"reward": 0.0, "rewards/right/mean": 0.125, "count": 9.0})
    for run.done in (1, 2, 3, 4):
        progress.iteration(run.done, 5, row(updated=0.0 if run.done == 2 else 1.0))
        progress.turn()
    progress.stop()
    say("rollplex: stopped")
    lines = [line for line in lines_of(terminal.close()) if line]
    assert lines[0] == "rollplex: run digits-1 in there"
    assert lines[1].endswith("data train: 7 rows")
    assert lines[2] == "evaluation held_out after 0: reward 0.000, rewards/right/mean 0.125 (9 rows)"
    assert lines[3].startswith("iteration 2/5  no update: ")
    assert lines[-1] == "rollplex: stopped"
    table = {line.split()[0]: line for line in lines[lines.index("digits-1") :]}
    assert "4/5" in table["iterations"]
    assert "held_out after 0: reward 0.000, right 0.125" in table["evaluation"]
    assert "0.250" in table["reward"]
    assert "50% of prefix time hidden" in "".join(lines)
    assert "generate groups 0-3" in table["waiting"]


@pytest.mark.parametrize("lost_at", ["turn", "stop"])
def test_a_terminal_that_is_gone_is_not_drawn_on_again(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, lost_at: str
) -> None:
    told = saying.Terminal()
    monkeypatch.setattr(progress_module, "TERMINAL", told)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    screen = Screen(terminal.stream)
    progress = TableProgress(screen, Run().look)
    progress.turn()

    def gone(_view: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(screen, "show", gone)
    monkeypatch.setattr(screen, "due", lambda: True)
    progress.turn() if lost_at == "turn" else progress.stop()
    assert told.lost
    assert not screen.drawn
    progress.stop()
    assert told._nowhere is not None
    told._nowhere.close()


def test_turns_between_two_drawings_do_not_even_look(terminal: Terminal) -> None:
    run = Run()
    progress = TableProgress(Screen(terminal.stream, lambda: 7.0), run.look)
    for _ in range(1000):
        progress.turn()
    assert run.looks == 1
    progress.stop()
    assert run.looks == 2


def test_an_end_before_anything_was_drawn_draws_nothing(terminal: Terminal) -> None:
    progress = make_progress(terminal.stream, Run().look)
    progress.stop()
    progress.turn()
    assert terminal.close() == ""


def test_elsewhere_and_on_a_dumb_terminal_there_are_plain_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert type(make_progress(terminal.stream, Run().look)) is Progress
    with open("/dev/null", "w", encoding="utf-8") as file:  # noqa: PTH123 - a file that is no terminal
        assert type(make_progress(file, Run().look)) is Progress
