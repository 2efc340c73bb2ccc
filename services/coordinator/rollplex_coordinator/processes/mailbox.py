"""Calls from other threads into the core: a queue, an eventfd that wakes the loop, and a future per call.

    HTTP thread ──call──► queue + eventfd ──► core's loop runs the function ──► future ──► HTTP thread
        waits for: the future      unblocked by: its result, the deadline, or the end of the core

Owns the hand-over. Knows nothing of what is asked.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, TypeVar

from rollplex.errors import WaitError

ResultT = TypeVar("ResultT")


class Mailbox:
    """One per core. `serve` belongs to the core's thread, `call` to all others."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls: queue.SimpleQueue[tuple[Callable[[Future[Any]], None], Future[Any]]] = queue.SimpleQueue()
        self._open: set[Future[Any]] = set()
        self._closed = False
        self._lock = threading.Lock()

    def call(self, function: Callable[[], ResultT], what: str, deadline_s: float) -> ResultT:
        """Run `function` in the core and return its result.

        Raises:
            WaitError: no answer within the deadline, or the core has ended.
            Exception: what the function raised.
        """

        def run(future: Future[ResultT]) -> None:
            future.set_result(function())

        return self.call_later(run, what, deadline_s)

    def call_later(self, function: Callable[[Future[ResultT]], None], what: str, deadline_s: float) -> ResultT:
        """As `call`, for what needs more than one turn of the loop: `function` gets the future and sees to its end."""
        future: Future[ResultT] = Future()
        with self._lock:
            if self._closed:
                raise _ended(what)
            self._calls.put((function, future))
            os.eventfd_write(self.fd, 1)
        try:
            return future.result(timeout=deadline_s)
        except FutureTimeoutError as error:
            future.cancel()
            raise WaitError(
                f"the coordinator did not answer: {what}",
                got=f"nothing for {deadline_s:.1f} s",
                needed="an answer",
                do="GET /status says what the run waits for.",
            ) from error

    def serve(self) -> None:
        """Run what was called for since the last turn."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        while not self._calls.empty():
            function, future = self._calls.get_nowait()
            if not future.set_running_or_notify_cancel():
                continue  # its caller has given up
            self._open.add(future)
            future.add_done_callback(self._open.discard)
            try:
                function(future)
            except Exception as error:  # noqa: BLE001 - a border between threads
                future.set_exception(error)  # the caller's thread raises it; the loop goes on

    def close(self) -> None:
        """The core ends: who still waits gets an error at once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self.fd)
        while not self._calls.empty():
            self._open.add(self._calls.get_nowait()[1])
        for future in list(self._open):
            if not future.done():
                future.set_exception(_ended("the request"))


def _ended(what: str) -> WaitError:
    return WaitError(f"the coordinator has ended before it could answer: {what}", do="Start the run again.")
