"""Calls from another thread into the core."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from rollplex.errors import StateError, WaitError
from rollplex_coordinator.processes.mailbox import Mailbox


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    """The result or error of a call made by another thread."""
    return ThreadPoolExecutor(max_workers=1).submit(function)


def serve_once(mailbox: Mailbox) -> None:
    """As the core's loop: wait for the descriptor, then serve."""
    ready, _, _ = select.select([mailbox.fd], [], [], 5)
    assert ready
    mailbox.serve()


def test_a_call_runs_in_the_thread_that_serves_and_its_result_comes_back() -> None:
    mailbox = Mailbox()
    result = in_thread(lambda: mailbox.call(threading.get_ident, "who", 5))
    serve_once(mailbox)
    assert result.result(5) == threading.get_ident()


def test_an_error_of_the_core_is_raised_where_the_call_was_made() -> None:
    def refuse() -> None:
        raise StateError("not now")

    mailbox = Mailbox()
    result = in_thread(lambda: mailbox.call(refuse, "something", 5))
    serve_once(mailbox)
    with pytest.raises(StateError, match="not now"):
        result.result(5)


def test_a_core_that_does_not_turn_is_named_at_the_deadline() -> None:
    mailbox = Mailbox()
    with pytest.raises(WaitError, match=r"did not answer: status; got nothing for 0\.1 s"):
        mailbox.call(lambda: None, "status", 0.1)


def test_calls_that_wait_when_the_core_ends_get_an_error_at_once() -> None:
    mailbox = Mailbox()
    never: list[Future[None]] = []
    waiting = in_thread(lambda: mailbox.call_later(never.append, "digests", 60))
    serve_once(mailbox)
    unread = in_thread(lambda: mailbox.call(lambda: None, "status", 60))
    select.select([mailbox.fd], [], [], 5)
    mailbox.close()
    for future in (waiting, unread):
        with pytest.raises(WaitError, match="has ended"):
            future.result(5)
    with pytest.raises(WaitError, match="has ended"):
        mailbox.call(lambda: None, "status", 60)
