"""A tracker's process: `python -m rollplex_coordinator.records.trackers`. Fed by `tracker`.

    stdin: Begin, then rows ─► backend ─► stdout: {"state": "ready" | "failed", "detail": …}

It ends at the end of its input, and no later than FINISH_S after it. What a package prints goes to its log.

    exit code 0   everything was handed over
    exit code 1   the tracker failed; the last line says how
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import BinaryIO, TextIO

import msgspec

from rollplex_coordinator.records.trackers.backends import BACKENDS, Begin, Row

FINISH_S = 60
NICENESS = 10


def serve(rows: BinaryIO, answers: TextIO) -> int:
    """Hand rows over until there are no more; returns the exit code."""
    try:
        begin = msgspec.json.decode(rows.readline(), type=Begin)
        backend = BACKENDS[begin.backend](begin)
        _say(answers, "ready", backend.where)
        decoder = msgspec.json.Decoder(Row)
        for line in rows:
            backend.log(decoder.decode(line))
        signal.alarm(FINISH_S)  # of no handler: it ends this process, which nobody may be there to end
        backend.finish()
    except Exception as error:  # noqa: BLE001 - outer loop of a process: whatever a foreign package raises is told
        _say(answers, "failed", f"{type(error).__name__}: {error}")
        return 1
    return 0


def _say(answers: TextIO, state: str, detail: str) -> None:
    answers.write(json.dumps({"state": state, "detail": detail}) + "\n")
    answers.flush()


def main() -> int:
    """See the module."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a package prints is no answer
    return serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    sys.exit(main())
