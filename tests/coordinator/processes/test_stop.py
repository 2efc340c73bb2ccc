"""A stop by a signal is an event at once, even where no handler runs."""

from __future__ import annotations

import signal
import subprocess
import sys

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
