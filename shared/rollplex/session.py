"""What is left of a session: the processes that a program started, by the kernel's word, and their end.

Owns how a living process is told from a dead one. Knows nothing of workers.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

_PAUSE_S = 0.01


def session_of(leader: int) -> list[int]:
    """Pids of the other living processes in a session: what its leader started and did not end."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit() and int(place.name) != leader:
            with suppress(OSError, IndexError):
                state, _, _, session = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
                if int(session) == leader and (state not in "ZX" or _threads(place) > 1):
                    found.append(int(place.name))
    return sorted(found)


def kill_session(leader: int) -> list[int]:
    """Kill the living of a session but its leader; returns who they were."""
    members = session_of(leader)
    for pid in members:
        kill(pid)
    return members


def await_session(leader: int, end_s: float) -> list[int]:
    """Kill the rest of a session, what it starts meanwhile too, until all are gone; returns who has not ended.

    Args:
        end_s: of CLOCK_MONOTONIC; by then it gives up.
    """
    while (members := kill_session(leader)) and time.monotonic() < end_s:
        time.sleep(_PAUSE_S)
    return members


def kill(pid: int) -> None:
    """SIGKILL; nothing if it has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _threads(place: Path) -> int:
    """A process whose first thread has ended is shown as a zombie, while its others still hold its memory. A dead one
    has that thread alone."""
    return sum(1 for _ in (place / "task").iterdir())
