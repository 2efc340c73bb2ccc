"""Runs a program as a child that gets our signals, and ours alone, and waits for its end."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from rollplex.cli.signals import hold_back, let_through
from rollplex.errors import RollplexError, ServiceDied
from rollplex.stop_signals import STOP_SIGNALS, to_take

_POLL_S = 0.5


def run_child(
    command: Sequence[str],
    *,
    grace_s: float,
    environment: Mapping[str, str] | None = None,
    output: int | None = None,
) -> int:
    """Start `command`, pass SIGINT, SIGTERM and SIGHUP on to it, and wait; its exit code.

    The child is its own process group, so that a Ctrl-C of the terminal reaches it once, through us. Signals wait from
    before its start until it lets them through (see `signals`).

    Args:
        grace_s: seconds from the first signal until the child is killed.
        environment: the child's; None: ours.
        output: descriptor that its standard output and error go to; None: to ours.

    Raises:
        ServiceDied: a signal killed it.
        RollplexError: it cannot be started.
    """
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    hold_back()
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
            env=environment,
        )
        return _wait(process, grace_s)
    except OSError as error:
        raise RollplexError("The coordinator cannot be started", got=str(error), where=command[0]) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        let_through()


def _wait(process: subprocess.Popen[bytes], grace_s: float) -> int:
    kill_at: list[float] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        kill_at.append(time.monotonic() + grace_s)
        process.send_signal(number)

    for number in to_take():
        signal.signal(number, forward)
    let_through()
    while True:
        try:
            code = process.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            if kill_at and time.monotonic() > kill_at[0]:
                process.kill()
            continue
        if code < 0:
            raise ServiceDied(
                "The coordinator was killed", got=signal.Signals(-code).name, do="Its log is in the run directory."
            )
        return code
