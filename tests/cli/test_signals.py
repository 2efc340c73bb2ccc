"""A signal at any moment of the start is a quiet end."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# Sends itself a signal when the module `at` is about to be imported, as a user's Ctrl-C during imports would.
_DURING_IMPORT = """
import os, sys
class Hook:
    def find_spec(self, name, path, target=None):
        if name == {at!r}:
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Hook())
sys.argv = ["rollplex", "demo", "--help"]
from rollplex.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("at", ["rollplex.cli.app", "typer", "rollplex.errors"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_a_signal_during_imports_ends_quietly(at: str, number: signal.Signals, code: int) -> None:
    text = _DURING_IMPORT.format(at=at, number=int(number))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_without_a_signal_the_same_program_prints_its_help() -> None:
    text = _DURING_IMPORT.format(at="no such module", number=int(signal.SIGINT))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0
    assert "--quick" in done.stdout


def test_the_entry_point_imports_nothing_slow_before_it_takes_the_signals() -> None:
    code = "import sys, rollplex.cli.signals; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {
        "typer",
        "click",
        "pydantic",
        "numpy",
        "msgspec",
        "typing",
        "yaml",
        "tokenizers",
        "torch",
        "asyncio",
    }


def test_a_signal_waits_across_exec_until_the_new_program_lets_it_through() -> None:
    new = (
        "import signal, sys; waiting = signal.sigpending();"
        "sys.exit(40 + (signal.SIGINT in waiting) + (signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    )
    old = (
        "import os, signal, sys; from rollplex.cli import signals, start; signals.end_quietly();"
        "real = os.execv\n"
        "def late(*args):\n    os.kill(os.getpid(), signal.SIGINT); real(*args)\n"
        f"os.execv = late; start.become([sys.executable, '-c', {new!r}])"
    )
    done = subprocess.run([sys.executable, "-c", old], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (42, "")


def test_the_coordinators_own_handlers_get_the_signal_that_waited() -> None:
    new = (
        "import sys; from rollplex_coordinator.processes.stop import Signals, StopRun; signals = Signals.install()\n"
        "stop = signals.stop_asked()\nsys.exit(stop.exit_code)"
    )
    old = (
        "import os, signal, sys; from rollplex.cli import signals, start; signals.end_quietly();"
        "real = os.execv\n"
        "def late(*args):\n    os.kill(os.getpid(), signal.SIGINT); real(*args)\n"
        f"os.execv = late; start.become([sys.executable, '-c', {new!r}])"
    )
    done = subprocess.run([sys.executable, "-c", old], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")
