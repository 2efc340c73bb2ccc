"""The signals that ask a program of ours to end. Imports nothing that takes time, `typing` neither."""

from __future__ import annotations

import signal

EXIT_INTERRUPTED = 130
"""After SIGINT; 0 after the others."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def to_take() -> tuple[signal.Signals, ...]:
    """Those that a program takes over: SIGHUP stays ignored where it is (nohup)."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignored)
