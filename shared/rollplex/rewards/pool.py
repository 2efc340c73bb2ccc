"""Several processes of the user's functions, each scoring one group at a time.

      submit ──► queue ──┬─► thread 0 ◄──► FunctionProcess 0
                         ├─► thread 1 ◄──► FunctionProcess 1      done(outcome, begin, end), from the thread
                         └─► …

    a thread waits for: a job; then what its process answers.    unblocked by: a job, an answer, the time limit, close.

A process that hangs or is lost is replaced by its thread, while the others go on. Which process scores which group
depends on which is free. Owns threads and jobs; does not know what a job means.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

from msgspec import Struct

from rollplex.rewards.process import Cancelled, FunctionProcess
from rollplex.rewards.wire import Broke, Ready, Returned, Score

END_LIMIT_S = 15.0
Outcome: TypeAlias = "list[Returned] | Broke"


class Job(Protocol):
    """What to do with one group. All of it is called from a thread of the pool."""

    request: Score

    def done(self, outcome: Outcome, start_s: float, end_s: float) -> None:
        """The functions were called; seconds of CLOCK_MONOTONIC."""
        ...

    def failed(self, error: Exception) -> None:
        """They cannot be called any more: the process could not be started anew, or `done` itself failed."""
        ...


class _Started(Struct, frozen=True, kw_only=True):
    index: int
    outcome: Ready | Exception


class Pool:
    """Processes and the threads that hold them.

    Args:
        make: a process that is not started; its argument is its `cancel_fd`.
        count: how many.
        limit_s: for one group.
    """

    def __init__(self, make: Callable[[int], FunctionProcess], count: int, limit_s: float) -> None:
        self._make = make
        self._count = count
        self._limit_s = limit_s
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[_Started] = queue.SimpleQueue()
        self._cancel_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), name=f"rewards-{index}", daemon=True)
            for index in range(count)
        ]

    def start(self) -> Ready:
        """Start all processes at once and wait until each has imported the functions.

        Raises:
            RewardError: what the first of them says that cannot.
        """
        for thread in self._threads:
            thread.start()
        started = sorted((self._started.get() for _ in self._threads), key=lambda item: item.index)
        for item in started:
            if isinstance(item.outcome, Exception):
                self.close()
                raise item.outcome
        first = started[0].outcome
        assert isinstance(first, Ready), "the others raised"
        return first

    def submit(self, job: Job) -> None:
        """Have a group scored as soon as a process is free; first come, first served."""
        self._jobs.put(job)

    def close(self) -> None:
        """End all processes, whatever they do; nothing is told to jobs any more."""
        if self._cancel_fd < 0:
            return
        os.eventfd_write(self._cancel_fd, 1)
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + END_LIMIT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self._cancel_fd)
        self._cancel_fd = -1

    def _serve(self, index: int) -> None:
        process = self._make(self._cancel_fd)
        try:
            try:
                self._started.put(_Started(index=index, outcome=process.start()))
            except Exception as error:  # noqa: BLE001 - whoever called start gets it
                self._started.put(_Started(index=index, outcome=error))
                return
            while (job := self._jobs.get()) is not None:
                self._do(process, job)
        except Cancelled:
            pass
        finally:
            process.end()

    def _do(self, process: FunctionProcess, job: Job) -> None:
        try:
            start_s = time.monotonic()
            outcome = process.score(job.request, self._limit_s)
            job.done(outcome, start_s, time.monotonic())
        except Cancelled:
            raise
        except Exception as error:  # noqa: BLE001 - the outer loop of this thread: the coordinator must hear of it
            job.failed(error)
