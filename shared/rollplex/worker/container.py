"""`python -m rollplex.worker.container ENGINE OPTIONS... IMAGE --run-dir DIR ...`: a service in a container.

A container is no child of whoever asks its engine for it: a signal that cannot be passed on, SIGKILL, would leave it
running. So a second process, in a session of its own, waits for the end of this one and has the engine end the
container. Everything else (SIGTERM, exit code) the engine's own command passes on.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import uuid
from typing import NoReturn

END_S = 20.0
"""For the engine to end a container."""
TURN_S = 0.5
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def main() -> NoReturn:
    """Be the container's process; its exit code."""
    engine, *rest = sys.argv[1:]
    name = f"rollplex-{uuid.uuid4().hex[:12]}"
    _guard(engine, name)
    early: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda given, _frame: early.append(given))
    process = subprocess.Popen([engine, "run", "--rm", "--name", name, *rest], stdin=subprocess.DEVNULL)
    for number in SIGNALS:
        signal.signal(number, lambda given, _frame: process.send_signal(given))
    for given in early:
        process.send_signal(given)
    while (code := _ended(process)) is None:
        pass
    os._exit(code if code >= 0 else 128 - code)


def _ended(process: subprocess.Popen[bytes]) -> int | None:
    """Its exit code within TURN_S. A handler runs between two turns if its signal came just before one fell asleep."""
    try:
        return process.wait(TURN_S)
    except subprocess.TimeoutExpired:
        return None


def _guard(engine: str, name: str) -> None:
    """Start the process that ends the container with this one."""
    own = os.pidfd_open(os.getpid())
    if os.fork():
        os.close(own)
        return
    os.setsid()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    select.select([own], [], [])  # without deadline on purpose: the end of that process is what this one is for
    done = subprocess.run([engine, "kill", name], check=False, capture_output=True, timeout=END_S)
    os._exit(done.returncode)


if __name__ == "__main__":
    main()
