"""Signals that ask for an end, and the one that nohup has ignored."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rollplex.cli.interrupts import Interrupted, interruptible
from rollplex.stop_signals import STOP_SIGNALS, to_take

USES = {
    "end_quietly": "from rollplex.cli.signals import end_quietly; end_quietly()",
    "coordinator": "from rollplex_coordinator.processes.stop import Signals; Signals.install()",
    "interruptible": "from rollplex.cli.interrupts import interruptible; kept = interruptible(); kept.__enter__()",
    "child": "from rollplex.cli.child import run_child; run_child([sys.executable, '-c', ASKS], grace_s=5.0)",
    "dry run": "from rollplex.cli.dry_run import _signals_noted; kept = _signals_noted(); kept.__enter__()",
}
"""Every way in which a program of ours takes signals over."""
_ASKS = """
import os, pathlib, time
from signal import SIGHUP, SIGTERM
def of(kind, number, pid):
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return bool(int(text.split(kind + ":")[1].split()[0], 16) >> (number - 1) & 1)
def say(pid):
    end = time.monotonic() + 20
    while not of("SigCgt", SIGTERM, pid) and time.monotonic() < end:
        time.sleep(0.01)
    print(of("SigCgt", SIGTERM, pid), of("SigCgt", SIGHUP, pid), of("SigIgn", SIGHUP, pid))
"""
"""Says whether a process hears SIGTERM and SIGHUP, and whether it ignores SIGHUP, by what the kernel knows of it."""
_PROGRAM = """
import os, signal, sys
{before}
ASKS = {asks!r} + "say(os.getppid())"
{use}
exec({asks!r})
if not {child}:
    say(os.getpid())
"""


@pytest.fixture
def ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_signal_that_is_ignored_is_not_taken_over(ignored: None) -> None:
    assert to_take() == (signal.SIGINT, signal.SIGTERM)


def test_otherwise_all_are() -> None:
    assert to_take() == STOP_SIGNALS


@pytest.mark.parametrize("nohup", [False, True])
@pytest.mark.parametrize("use", sorted(USES))
def test_whoever_takes_signals_over_leaves_nohups_alone(use: str, nohup: bool) -> None:
    before = "signal.signal(signal.SIGHUP, signal.SIG_IGN)" if nohup else ""
    text = _PROGRAM.format(before=before, use=USES[use], asks=_ASKS, child=use == "child")
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["True", str(not nohup), str(nohup)]


def test_a_hangup_interrupts_as_sigterm_does() -> None:
    with pytest.raises(Interrupted) as caught, interruptible():
        signal.raise_signal(signal.SIGHUP)
    assert caught.value.exit_code == 0
