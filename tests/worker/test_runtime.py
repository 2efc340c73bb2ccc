"""Whole worker processes over real sockets: how they end, what they say last, what their exit code is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rollplex.errors import DataError, RollplexError, StateError
from rollplex.protocol.codec import CHANNELS
from rollplex.protocol.common import (
    Alive,
    DigestReply,
    DigestRequest,
    Failed,
    Leave,
    Leaving,
    Received,
    Role,
)
from rollplex.worker.runtime import report
from rollplex.worker.starter import VARIABLE
from rollplex_coordinator.processes.hub import Arrived, Gone, Hub, Joined, Peer
from support.sockets import DEADLINE_S, WELCOME, open_hub

HEAD = """
import sys, time
from rollplex.errors import StateError
from rollplex.protocol.common import DigestReply, Role
from rollplex.worker import run

class Service:
    def __init__(self, segments):
        print("made for", segments.run_id, flush=True)
"""
ANSWERS = """
    def handle(self, message, reply):
        reply(DigestReply(cause=message.cause, version=1, digest="d"))
"""
RAISES = """
    def handle(self, message, reply):
        raise StateError("out of order", got="this", needed="that", do="Mend it.", where="unit 3")
"""
CRASHES = """
    def handle(self, message, reply):
        return {}["nothing"]
"""
SLOW = """
    def handle(self, message, reply):
        print("working", flush=True)
        time.sleep(0.3)
        reply(DigestReply(cause=message.cause, version=1, digest="slow"))
        print("worked", flush=True)
"""
HANGS = """
    def handle(self, message, reply):
        print("working", flush=True)
        time.sleep(600)
"""
WAITS_IN_C = """
    def handle(self, message, reply):
        import ctypes
        c, lock = ctypes.CDLL(None), ctypes.create_string_buffer(256)
        print("working", flush=True)
        c.pthread_mutex_lock(lock)
        c.pthread_mutex_lock(lock)  # no signal ends this wait
"""
TAKES_THE_DESCRIPTOR = (
    """
        import signal
        signal.set_wakeup_fd(-1)
"""
    + ANSWERS
)
CLOSES = """
    def close(self):
        print("closed", flush=True)
"""
CANNOT_CLOSE = """
    def close(self):
        raise StateError("a child that stays")
"""
TAIL = "\nrun(Role.ROLLOUT, Service)\n"


class Process:
    """A worker process and what it printed."""

    def __init__(self, run_dir: Path, code: str, *arguments: str) -> None:
        self.log = run_dir.with_name(f"log-{os.urandom(4).hex()}")
        with self.log.open("wb") as log:
            command = [sys.executable, "-c", HEAD + code + TAIL, "--run-dir", str(run_dir), *arguments]
            self.popen = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def wait(self) -> int:
        return self.popen.wait(DEADLINE_S)

    @property
    def printed(self) -> str:
        return self.log.read_text()


class Site:
    """The coordinator's end."""

    def __init__(self, run_dir: Path, stack: ExitStack) -> None:
        self.run_dir = run_dir
        self._stack = stack
        self._hub_stack = ExitStack()
        self.hub: Hub | None = None
        self.heard: list[Any] = []
        self._started: list[Process] = []
        self._pending: deque[Any] = deque()
        """Events that nobody has asked for yet."""

    def open(self, grace_s: float = 30.0) -> Site:
        self.hub = self._hub_stack.enter_context(
            open_hub(self.run_dir, [Role.ROLLOUT], replace(WELCOME, grace_s=grace_s))
        )
        self._stack.callback(self.close)
        return self

    def close(self) -> None:
        """The coordinator ends."""
        self._hub_stack.close()

    def start(self, code: str, *arguments: str) -> Process:
        process = Process(self.run_dir, code, *arguments)
        self._started.append(process)
        self._stack.callback(process.popen.wait, DEADLINE_S)
        self._stack.callback(process.popen.kill)
        return process

    def until(self, kind: type[Any]) -> Any:
        """The next event of a type, or message of a type."""
        for _ in range(int(DEADLINE_S / 0.05)):
            self.turn()
            while self._pending:
                event = self._pending.popleft()
                found = event.message if isinstance(event, Arrived) else event
                if not isinstance(found, Alive):
                    self.heard.append(found)
                if isinstance(found, kind):
                    return found
        printed = "".join(process.printed for process in self._started)
        raise AssertionError(f"no {kind.__name__}; heard {self.heard}; printed:\n{printed}")

    def turn(self) -> None:
        """Take in what there is."""
        assert self.hub is not None
        self._pending += self.hub.poll(0 if self._pending else 0.05)

    def until_printed(self, process: Process, text: str) -> None:
        """Until a process has printed this."""
        end_s = time.monotonic() + DEADLINE_S
        while text not in process.printed:
            assert time.monotonic() < end_s, process.printed
            self.turn()

    def joined(self, code: str) -> tuple[Process, Peer]:
        process = self.start(code)
        peer: Peer = self.until(Joined).peer
        return process, peer

    def tell(self, peer: Peer, message: Any) -> None:
        assert self.hub is not None
        self.hub.send(peer, message)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path / "run", stack)


# --- told to leave ------------------------------------------------------------------------------------------------


def test_a_worker_serves_until_it_is_told_to_leave_and_ends_with_0(site: Site) -> None:
    process, peer = site.open().joined(ANSWERS)
    for cause in (1, 2):
        site.tell(peer, DigestRequest(cause=cause))
        assert site.until(DigestReply).cause == cause
    site.tell(peer, Leave(reason="the run ended"))
    site.until(Gone)
    assert process.wait() == 0
    assert "made for test-run" in process.printed
    assert "told to leave: the run ended" in process.printed
    assert [m for m in site.heard if isinstance(m, Received)] == [Received(cause=1), Received(cause=2)]


def test_a_worker_that_is_told_to_leave_finishes_what_it_is_at(site: Site) -> None:
    process, peer = site.open().joined(SLOW)
    site.tell(peer, DigestRequest(cause=1))
    site.until_printed(process, "working")
    site.tell(peer, Leave(reason="the run ended"))
    assert site.until(DigestReply).digest == "slow"
    assert process.wait() == 0


@pytest.mark.parametrize(
    ("code", "end", "exit_code"), [(ANSWERS, "leave", 0), (RAISES, "fail", 1), (ANSWERS, "gone", 3)]
)
def test_a_service_with_a_close_is_closed_whatever_the_end(site: Site, code: str, end: str, exit_code: int) -> None:
    process, peer = site.open().joined(code + CLOSES)
    site.tell(peer, DigestRequest(cause=1))
    site.until(Failed if end == "fail" else DigestReply)
    if end == "leave":
        site.tell(peer, Leave(reason="done"))
    elif end == "gone":
        site.close()
    assert process.wait() == exit_code
    assert process.printed.count("closed") == 1


def test_a_close_that_fails_is_logged_and_the_end_stays_what_it_was(site: Site) -> None:
    process, peer = site.open().joined(ANSWERS + CANNOT_CLOSE)
    site.tell(peer, DigestRequest(cause=1))
    site.until(DigestReply)
    site.tell(peer, Leave(reason="done"))
    assert process.wait() == 0
    assert "a child that stays" in process.printed


def test_an_interrupt_from_the_terminal_is_the_coordinator_s_to_handle(site: Site) -> None:
    process, peer = site.open().joined(ANSWERS)
    process.popen.send_signal(signal.SIGINT)
    site.tell(peer, DigestRequest(cause=1))
    site.until(DigestReply)
    site.tell(peer, Leave(reason="done"))
    assert process.wait() == 0


# --- failures -----------------------------------------------------------------------------------------------------


def test_an_error_of_ours_reaches_the_coordinator_with_its_parts_and_ends_the_worker_with_1(site: Site) -> None:
    process, peer = site.open().joined(RAISES)
    site.tell(peer, DigestRequest(cause=9))
    failed = site.until(Failed)
    error = failed.error
    assert failed.cause == 9
    assert (error.kind, error.what, error.got, error.needed) == ("StateError", "out of order", "this", "that")
    assert (error.do, error.where) == ("Mend it.", "unit 3")
    assert 'raise StateError("out of order"' not in error.what
    assert "in handle" in error.traceback
    assert process.wait() == 1
    assert "instruction 9 failed" in process.printed


def test_any_other_exception_is_named_too(site: Site) -> None:
    process, peer = site.open().joined(CRASHES)
    site.tell(peer, DigestRequest(cause=9))
    error = site.until(Failed).error
    assert (error.kind, error.what) == ("KeyError", "KeyError: 'nothing'")
    assert process.wait() == 1


def test_a_service_that_cannot_be_made_says_why(site: Site) -> None:
    process, _ = site.open().joined('        raise StateError("no such engine")\n')
    failed = site.until(Failed)
    assert (failed.cause, failed.error.what) == (0, "no such engine")
    assert process.wait() == 1


def test_a_worker_that_is_refused_ends_at_once_and_says_why(site: Site) -> None:
    process = site.open().start(ANSWERS, "--incarnation", "5")
    assert site.hub is not None
    while process.popen.poll() is None:
        site.hub.poll(0.05)
    assert process.wait() == 1
    assert "refused the connection (incarnation)" in process.printed
    assert "Traceback" not in process.printed


# --- the coordinator ends -----------------------------------------------------------------------------------------


def test_a_worker_whose_coordinator_ends_leaves_with_3(site: Site) -> None:
    process, peer = site.open().joined(ANSWERS)
    site.tell(peer, DigestRequest(cause=1))
    site.until(DigestReply)
    site.close()
    assert process.wait() == 3
    assert "the coordinator ended" in process.printed


def test_a_worker_whose_coordinator_ends_finishes_its_unit(site: Site) -> None:
    process, peer = site.open().joined(SLOW)
    site.tell(peer, DigestRequest(cause=1))
    site.until(Received)
    site.until_printed(process, "working")
    site.close()
    assert process.wait() == 3
    assert "worked" in process.printed


def test_a_unit_that_does_not_end_is_cut_off_after_the_grace_time(site: Site) -> None:
    process, peer = site.open(grace_s=0.2).joined(HANGS)
    site.tell(peer, DigestRequest(cause=1))
    site.until(Received)
    site.until_printed(process, "working")
    site.close()
    assert process.wait() == 3


def test_a_worker_that_still_starts_when_the_coordinator_ends_leaves_at_once(site: Site) -> None:
    process, _ = site.open().joined("        time.sleep(600)\n")
    site.close()
    assert process.wait() == 3


# --- SIGTERM ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [ANSWERS, TAKES_THE_DESCRIPTOR], ids=["", "the handler alone"])
def test_a_worker_that_is_asked_from_outside_to_end_asks_the_coordinator(site: Site, code: str) -> None:
    process, peer = site.open().joined(code)
    site.tell(peer, DigestRequest(cause=1))
    site.until(DigestReply)
    process.popen.send_signal(signal.SIGTERM)
    assert site.until(Leaving).reason == "SIGTERM"
    site.tell(peer, DigestRequest(cause=2))
    site.until(DigestReply)
    site.tell(peer, Leave(reason="stopped"))
    assert process.wait() == 0


@pytest.mark.parametrize("code", [HANGS, WAITS_IN_C], ids=["in Python", "in C, where no handler runs"])
def test_a_worker_that_is_not_told_to_leave_in_time_leaves_by_itself(site: Site, code: str) -> None:
    process, peer = site.open(grace_s=0.2).joined(code)
    site.tell(peer, DigestRequest(cause=1))
    site.until(Received)
    site.until_printed(process, "working")
    process.popen.send_signal(signal.SIGTERM)
    site.until(Leaving)
    assert process.wait() == 0


def test_a_worker_without_a_coordinator_ends_when_it_is_asked_to(site: Site) -> None:
    process = site.start(ANSWERS)
    for _ in range(400):
        handlers = Path(f"/proc/{process.popen.pid}/status").read_text().split("SigCgt:")[1].split()[0]
        if int(handlers, 16) >> (signal.SIGTERM - 1) & 1:
            break
        time.sleep(0.02)
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert "told to leave before there was a coordinator" in process.printed


def test_a_worker_that_has_not_joined_ends_with_whoever_started_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as starter:
        monkeypatch.setenv(VARIABLE, str(starter.pid))
        process = site.start(ANSWERS)
        time.sleep(0.2)
        assert process.popen.poll() is None
        starter.kill()
        assert process.wait() == 3
    assert "its starter ended before there was a coordinator" in process.printed


def test_without_a_coordinator_the_wait_ends_with_an_error(site: Site) -> None:
    process = site.start(ANSWERS, "--connect-deadline-s", "0.2")
    assert process.wait() == 1
    assert "no coordinator answers" in process.printed
    assert str(site.run_dir) in process.printed


# --- the command line and the report ------------------------------------------------------------------------------


def test_a_device_in_another_form_is_refused(site: Site) -> None:
    process = site.start(ANSWERS, "--device", "cuda")
    assert process.wait() == 2
    assert "--device must be NODE:INDEX, such as 0:0; got 'cuda'" in process.printed


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as same:  # noqa: BLE001 - to give it a traceback
        return same


@pytest.mark.parametrize(
    "error",
    [
        StateError("short"),
        DataError("x" * 200_000, got="y" * 200_000, needed="z" * 200_000, do="a" * 200_000, where="b" * 200_000),
        DataError("a file name that is not UTF-8: \udcff\udc80", where="/data/\udcff.png"),
        ValueError("v" * 200_000 + "\udcff"),
        KeyError("k"),
    ],
    ids=["short", "long", "not UTF-8", "a long one of Python", "a short one of Python"],
)
def test_every_error_can_be_sent(error: Exception) -> None:
    """The message about an error must not fail for the error's own text."""
    told = report(caught(error))
    message = Failed(cause=1, error=told)
    channel = CHANNELS[Role.INPUT].from_worker
    assert channel.decode(channel.encode(message)) == message
    assert told.kind == type(error).__name__
    if isinstance(error, RollplexError):
        assert told.what[:20] == error.what[:20]
