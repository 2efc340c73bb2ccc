"""What the HTTP thread may ask of the core, and nothing else.

    HTTP worker thread ──Control method──► mailbox ──► core's loop ──► answer
        waits for: the answer          unblocked by: the answer, the deadline, or the end of the core

Owns the contract. The core's side of it lives with the core; tests use a fake.
"""

from __future__ import annotations

from typing import Protocol

from rollplex.journal.events import StopWhen
from rollplex.protocol.common import Role
from rollplex_coordinator.http.views import (
    CheckpointView,
    DigestsView,
    HealthView,
    IterationView,
    LedgerView,
    ServiceView,
    StatusView,
    SwapView,
)


class Control(Protocol):
    """Callable from any thread; every method returns or raises within a deadline of its own.

    Raises:
        StateError: from the methods that change something: the run's state does not allow it (HTTP 409).
        WaitError: the core, or the peer that it asked, did not answer in time (HTTP 504). When the core ends, calls
            that still wait end at once, with this error.
    """

    def start(self, count: int) -> StatusView:
        """Want `count` (at least 1) more iterations. Returns once that is noted, not once they have run."""
        ...

    def stop(self, *, when: StopWhen, exit: bool) -> StatusView:  # noqa: A002 - the API's word
        """Stop after the present iteration, or give it up now; then end the run, or wait for the next start.

        Returns once that is noted. An update that has begun is finished in any case.
        """
        ...

    def status(self) -> StatusView:
        """Where the run stands and what it waits for."""
        ...

    def iterations(self, first: int, limit: int) -> tuple[IterationView, ...]:
        """At most `limit` iterations from step `first` on, in order."""
        ...

    def iteration(self, step: int) -> IterationView | None:
        """One iteration; None: it has not been started."""
        ...

    def ledger(self) -> LedgerView:
        """Leases, budgets and what waits for memory."""
        ...

    def services(self) -> tuple[ServiceView, ...]:
        """Every service process, dead ones too."""
        ...

    def swap(self, role: Role, command: tuple[str, ...]) -> SwapView:
        """Replace a service at a border between iterations, if the newcomer conforms. Returns once that is noted."""
        ...

    def digests(self) -> DigestsView:
        """Ask every service that maps the weights for its digest of them."""
        ...

    def checkpoints(self) -> tuple[CheckpointView, ...]:
        """Those on disk, oldest first."""
        ...

    def checkpoint(self) -> StatusView:
        """Want a checkpoint after the present iteration. Returns once that is noted."""
        ...

    def health(self) -> HealthView:
        """What the run needs, and whether each part is there. Answered fast, or not at all."""
        ...
