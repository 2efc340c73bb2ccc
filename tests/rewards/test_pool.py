"""Several processes of functions at once."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollplex.errors import RewardError
from rollplex.protocol.reward import RewardProblem
from rollplex.rewards.pool import Outcome, Pool
from rollplex.rewards.process import FunctionProcess
from rollplex.rewards.wire import Broke, Function, Score

Functions = Callable[[str], Path]
MakePool = Callable[..., Pool]


class Noted:
    """A job that puts what becomes of it into a queue."""

    def __init__(self, step: int, answers: queue.SimpleQueue[tuple[int, Outcome | Exception]]) -> None:
        self.request = Score(
            row=b'{"prompt": "a"}', texts=("x",), lengths=(1,), tokens=b"1234", stopped=(True,), step=step
        )
        self._answers = answers

    def done(self, outcome: Outcome, start_s: float, end_s: float) -> None:
        assert start_s <= end_s
        self._answers.put((self.request.step, outcome))

    def failed(self, error: Exception) -> None:
        self._answers.put((self.request.step, error))


@pytest.fixture
def pool() -> Iterator[MakePool]:
    made: list[Pool] = []

    def make(path: Path, count: int, limit_s: float = 30.0) -> Pool:
        functions = [Function(spec=f"{path}:f")]
        made.append(
            Pool(lambda fd: FunctionProcess(functions, 0, lambda _: None, cancel_fd=fd), count, limit_s),
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def collect(pool: Pool, steps: list[int]) -> dict[int, Outcome | Exception]:
    """Submit a job for each step; what became of each."""
    answers: queue.SimpleQueue[tuple[int, Outcome | Exception]] = queue.SimpleQueue()
    for step in steps:
        pool.submit(Noted(step, answers))
    return dict(answers.get(timeout=60) for _ in steps)


def values(outcome: Outcome | Exception) -> list[float | None]:
    assert isinstance(outcome, list), outcome
    return outcome[0].values


TOGETHER = """
import pathlib, time
folder = pathlib.Path(__file__).parent
def f(prompts, step):
    (folder / f"in_{step[0] if isinstance(step, list) else step}").touch()
    while len(list(folder.glob("in_*"))) < 3: time.sleep(0.01)
    return [float(step)] * len(prompts)
"""


def test_as_many_groups_are_scored_at_once_as_there_are_processes(pool: MakePool, functions: Functions) -> None:
    """The function returns only when three calls are under way."""
    three = pool(functions(TOGETHER), 3)
    three.start()
    outcomes = collect(three, [10, 11, 12])
    assert {step: values(outcome) for step, outcome in outcomes.items()} == {10: [10.0], 11: [11.0], 12: [12.0]}


MOODY = """
import os, time
def f(prompts, step):
    if step % 4 == 1: time.sleep(600)
    if step % 4 == 2: os._exit(3)
    if step % 4 == 3: raise KeyError(step)
    return [float(step)] * len(prompts)
"""


def test_processes_that_hang_or_die_are_replaced_and_every_job_has_its_own_answer(
    pool: MakePool, functions: Functions
) -> None:
    two = pool(functions(MOODY), 2, 1.0)
    two.start()
    outcomes = collect(two, list(range(12)))
    problems = {1: RewardProblem.TIMED_OUT, 2: RewardProblem.RAISED, 3: RewardProblem.RAISED}
    for step in range(12):
        outcome = outcomes[step]
        if step % 4 == 0:
            assert values(outcome) == [float(step)]
        else:
            assert isinstance(outcome, Broke)
            assert outcome.problem is problems[step % 4]


def test_close_ends_calls_that_would_never_return_and_answers_nothing_more(
    pool: MakePool, functions: Functions
) -> None:
    two = pool(functions("import time\ndef f(prompts): time.sleep(600)\n"), 2, 600.0)
    two.start()
    answers: queue.SimpleQueue[tuple[int, Outcome | Exception]] = queue.SimpleQueue()
    for step in range(5):
        two.submit(Noted(step, answers))
    two.close()
    assert answers.empty()
    assert not any(thread.is_alive() for thread in two._threads)
    two.close()


def test_a_function_that_cannot_be_imported_is_told_once_and_nothing_is_left_running(
    pool: MakePool, functions: Functions
) -> None:
    three = pool(functions("raise KeyError('gone')"), 3)
    with pytest.raises(RewardError, match="KeyError: 'gone'"):
        three.start()
    assert not any(thread.is_alive() for thread in three._threads)


def test_a_process_that_cannot_be_started_again_fails_its_job(pool: MakePool, functions: Functions) -> None:
    path = functions("import os\ndef f(prompts): os._exit(1)\n")
    one = pool(path, 1)
    one.start()
    (first,) = collect(one, [0]).values()
    assert isinstance(first, Broke)
    path.unlink()
    (second,) = collect(one, [1]).values()
    assert isinstance(second, RewardError)
    assert second.what == "There is no such file"
