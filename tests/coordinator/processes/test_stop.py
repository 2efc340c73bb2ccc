"""Signals as events of the loop."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rollplex_coordinator.processes.stop import Signals, StopRun

DEADLINE_S = 20.0
WAITS_IN_C = """
import ctypes, os, select, threading
from rollplex_coordinator.processes.stop import Signals

def hear():
    select.select([signals.read_fd], [], [])
    print("heard", flush=True)
    os._exit(0)

signals = Signals.install()
threading.Thread(target=hear).start()
c, lock = ctypes.CDLL(None), ctypes.create_string_buffer(256)
print("up", flush=True)
c.pthread_mutex_lock(lock)
c.pthread_mutex_lock(lock)  # no signal ends this wait
"""


@pytest.fixture
def signals() -> Iterator[Signals]:
    """Installed in this process; everything is put back afterwards."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    installed = Signals.install()
    yield installed
    assert signal.set_wakeup_fd(-1) == installed.write_fd
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for fd in (installed.read_fd, installed.write_fd):
        os.close(fd)


def readable(signals: Signals) -> bool:
    return bool(select.select([signals.read_fd], [], [], 0)[0])


def test_without_a_signal_nobody_asks_for_a_stop(signals: Signals) -> None:
    assert not readable(signals)
    assert signals.stop_asked() is None


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_makes_the_descriptor_readable_and_asks_for_a_stop(
    signals: Signals, number: signal.Signals, code: int
) -> None:
    signal.raise_signal(number)
    assert readable(signals)
    stop = signals.stop_asked()
    assert stop is not None
    assert (stop.source, stop.exit_code, str(stop)) == (number.name, code, f"stopped by {number.name}")
    assert not readable(signals), "the loop must not turn for ever"
    assert isinstance(signals.stop_asked(), StopRun), "it is not forgotten"


def test_signals_that_were_held_back_before_arrive_once_they_are_taken_over(signals: Signals) -> None:
    assert not {signal.SIGINT, signal.SIGTERM} & signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_the_first_signal_decides_and_a_second_one_escalates(signals: Signals) -> None:
    calls: list[str] = []
    signals.escalate = lambda: calls.append("escalated")
    signal.raise_signal(signal.SIGTERM)
    assert calls == []
    signal.raise_signal(signal.SIGINT)
    assert calls == ["escalated"]
    stop = signals.stop_asked()
    assert stop is not None
    assert (stop.source, stop.exit_code) == ("SIGTERM", 0)


def test_descriptors_are_not_passed_on_to_children(signals: Signals) -> None:
    assert not os.get_inheritable(signals.read_fd)
    assert not os.get_inheritable(signals.write_fd)


def test_a_signal_that_no_handler_has_seen_yet_wakes_the_loop() -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS_IN_C], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
            assert process.stdout.readline() == "heard\n"
        finally:
            process.kill()
