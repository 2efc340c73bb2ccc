"""How much work is wanted, and how it ends."""

from __future__ import annotations

import pytest

from rollplex.errors import StateError
from rollplex.journal.events import StopWhen
from rollplex_coordinator.decisions.work import Work


def test_a_run_ends_when_its_iterations_are_done() -> None:
    work = Work(2, serve=False)
    assert (work.iterate, work.last) == (True, False)
    work.done = 2
    assert (work.iterate, work.stay, work.last) == (False, False, True)


def test_a_serving_run_stays_and_starts_again() -> None:
    work = Work(0, serve=True)
    assert (work.iterate, work.stay, work.last) == (False, True, False)
    work.start(3)
    assert (work.wanted, work.iterate) == (3, True)
    work.done = 1
    work.start(2)
    assert work.wanted == 5


def test_no_run_has_more_iterations_than_can_be_counted() -> None:
    work = Work(7, serve=True)
    with pytest.raises(StateError, match="got 2147483654 in all; needed at most 2147483647"):
        work.start(2**31 - 1)
    assert work.wanted == 7
    work.start(2**31 - 8)
    assert work.wanted == 2**31 - 1


def test_stopping_after_the_iteration_keeps_a_serving_run_or_ends_it() -> None:
    work = Work(5, serve=True)
    work.done = 2
    work.stop_after_iteration(end=False)
    assert (work.iterate, work.stay) == (False, True)
    work.start(1)
    assert (work.iterate, work.wanted) == (True, 3)
    work.stop_after_iteration(end=True)
    assert (work.iterate, work.last, work.stopping) == (False, True, StopWhen.AFTER_ITERATION)
    with pytest.raises(StateError, match="stopping"):
        work.start(1)
