"""Runs as the command line finds them: a live one with a real API and a recording control, and ended ones."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from rollplex.journal.events import Event, IterationDone, RunEnded, RunStarted
from rollplex.protocol.claim import claim
from rollplex_coordinator.records.journal import Journal
from support.http_site import QUICK, TOKEN, FakeControl, Site

RUN = "r1"
"""The run of `FakeControl`."""


def started(run: str = RUN, wanted: int | None = 10) -> RunStarted:
    """The first event of a run."""
    return RunStarted(
        run=run,
        pid=7,
        host=socket.gethostname(),
        boot_id="b",
        seed=0,
        schedule="overlap",
        share_prefix=True,
        config_digest="d",
        iterations_wanted=wanted,
    )


def done(step: int, reward: float | None = 0.5) -> IterationDone:
    """One iteration is over."""
    return IterationDone(step=step, version=step + 1, metrics={"reward": reward})


def ended(reason: str = "done", code: int = 0, run: str = RUN) -> RunEnded:
    """The last event of an orderly end."""
    return RunEnded(run=run, exit_code=code, reason=reason)


def leave(run_dir: Path, *events: Event) -> Path:
    """A run directory in which a coordinator journalled these and is gone."""
    with claim(run_dir, RUN), Journal(run_dir / "journal.sqlite") as journal:
        for event in events:
            journal.append(event)
        journal.flush()
    return run_dir


class LiveRun:
    """A run that this process holds: lock, address, token, journal, API."""

    def __init__(self, run_dir: Path, run: str = RUN) -> None:
        self.run_dir = run_dir
        self._stack = ExitStack()
        self.claim = self._stack.enter_context(claim(run_dir, run))
        self.site = self._stack.enter_context(Site(run_dir, QUICK))
        (run_dir / "http.json").write_text(json.dumps({"url": self.site.server.url, "run": run}))
        (run_dir / "token").write_text(TOKEN + "\n")
        self.journal(started(run))

    @property
    def control(self) -> FakeControl:
        """What the API asks; notes every call."""
        return self.site.control

    def journal(self, *events: Event) -> None:
        """Journal events, for readers to see at once."""
        for event in events:
            self.site.journal.append(event)
        self.site.journal.flush()

    def end(self) -> None:
        """As a coordinator ends: the lock goes last."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
