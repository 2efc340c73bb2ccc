"""A child that gets our signals once, and whose end is ours."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollplex.cli.child import run_child
from rollplex.errors import RollplexError, ServiceDied
from rollplex.stop_signals import STOP_SIGNALS

Program = Callable[[str], list[str]]


def _when_there(file: Path, act: Callable[[], None]) -> threading.Thread:
    """Do something as soon as a file is there."""

    def wait() -> None:
        until = time.monotonic() + 30
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_the_exit_code_is_the_childs(program: Program) -> None:
    assert run_child(program("sys.exit(3)"), grace_s=5) == 3


def test_the_child_reads_nothing_from_our_terminal_and_is_its_own_group(program: Program) -> None:
    assert run_child(program("sys.exit(sys.stdin.read() != '' or os.getpgrp() != os.getpid())"), grace_s=5) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_once(program: Program, tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "log"
    command = program(
        f"log = open({str(log)!r}, 'w')\n"
        "def note(number, frame):\n    print(number, file=log, flush=True)\n"
        "take(note)\n"
        f"open({str(tmp_path / 'ready')!r}, 'w').close()\n"
        "until = time.monotonic() + 30\n"
        f"while not os.path.getsize({str(log)!r}) and time.monotonic() < until: time.sleep(0.01)\n"
        "time.sleep(0.2)\n"
        "sys.exit(130)"
    )
    thread = _when_there(tmp_path / "ready", lambda: os.kill(os.getpid(), number))
    assert run_child(command, grace_s=30) == 130
    thread.join()
    assert log.read_text().split() == [str(int(number))]


def test_a_signal_before_the_child_is_ready_waits_and_is_no_traceback(
    program: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = program(
        f"open({str(tmp_path / 'ready')!r}, 'w').close()\n"
        "until = time.monotonic() + 30\n"
        "while signal.SIGINT not in signal.sigpending() and time.monotonic() < until: time.sleep(0.01)\n"
        "take(lambda number, frame: sys.exit(130))\n"
        "sys.exit(1)"
    )
    thread = _when_there(tmp_path / "ready", lambda: os.kill(os.getpid(), signal.SIGINT))
    assert run_child(command, grace_s=30) == 130
    thread.join()
    assert capfd.readouterr() == ("", "")


def test_a_child_that_ignores_the_signal_is_killed_after_the_grace_time(program: Program, tmp_path: Path) -> None:
    command = program(
        "take(signal.SIG_IGN)\n" + f"open({str(tmp_path / 'ready')!r}, 'w').close()\n" + "time.sleep(30)\nsys.exit(0)"
    )
    thread = _when_there(tmp_path / "ready", lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(ServiceDied, match="SIGKILL"):
        run_child(command, grace_s=0.2)
    thread.join()


def test_a_child_that_was_killed_is_an_error_that_names_the_signal(program: Program) -> None:
    with pytest.raises(ServiceDied, match="SIGKILL"):
        run_child(program("os.kill(os.getpid(), signal.SIGKILL)"), grace_s=5)


def test_a_program_that_is_not_there_is_an_error_and_leaves_the_signals_as_they_were(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RollplexError, match="cannot be started"):
        run_child([str(tmp_path / "none")], grace_s=5)
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_afterwards_the_signals_are_as_they_were(program: Program) -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    run_child(program(""), grace_s=5)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_the_child_gets_the_environment_that_it_was_given(program: Program) -> None:
    command = program("sys.exit(os.environ.get('X') != '1')")
    assert run_child(command, grace_s=5, environment={**os.environ, "X": "1"}) == 0
