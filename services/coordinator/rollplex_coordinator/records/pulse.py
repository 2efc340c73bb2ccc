"""Writes RUN/health.json while the core's loop turns: for health checks of services that have no network.

Never fails a run: a disk that refuses is told once, and the checks then say that nothing was written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rollplex.health import PERIOD_S, Note, ServiceNote, write
from rollplex_coordinator.http.views import ServiceView

log = logging.getLogger("rollplex.coordinator")


class Pulse:
    """One run's health.json. Belongs to the core's thread."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._next_s = 0.0
        self._told = False

    def turn(self, services: Callable[[], Sequence[ServiceView]]) -> None:
        """The loop turned; often, so `services` is asked only when a note is due."""
        now = self._clock()
        if now < self._next_s:
            return
        self._next_s = now + PERIOD_S
        note = Note(
            written_s=now,
            services=tuple(
                ServiceNote(
                    service=view.service, state=view.state, busy_with=view.busy_with, heard_age_s=view.heard_age_s
                )
                for view in services()
            ),
        )
        try:
            write(self._run_dir, note)
        except OSError as error:
            if not self._told:
                self._told = True
                log.warning("%s cannot be written: %s. Health checks of containers will fail", self._run_dir, error)
