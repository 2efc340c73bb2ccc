"""What a run says of itself at its beginning: what it is, and since when its process has been there."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from pathlib import Path

from rollplex.config.config import Config
from rollplex.config.loading import dump
from rollplex.journal.events import RunStarted


def run_started(run_id: str, config: Config, iterations_wanted: int, *, resumed: bool = False) -> RunStarted:
    """The run's first event."""
    return RunStarted(
        run=run_id,
        pid=os.getpid(),
        host=socket.gethostname(),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
        seed=config.run.seed,
        schedule=config.run.schedule,
        share_prefix=config.run.share_prefix,
        config_digest=hashlib.sha256(dump(config).encode()).hexdigest(),
        iterations_wanted=iterations_wanted,
        resumed=resumed,
    )


def process_start_s() -> float:
    """The start of this process as CLOCK_MONOTONIC seconds, to a hundredth; exec does not change it.

    Where the kernel does not tell, the present moment.
    """
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        ticks = int(stat.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return time.monotonic()
    asleep_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()  # the kernel counts it, the journal does not
    return min(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK") - asleep_s)
