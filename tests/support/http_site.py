"""A control that notes what it is asked, and the real server around it: uvicorn on a loopback socket."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import httpx

from rollplex.journal.events import (
    ErrorRaised,
    EvalDone,
    GroupFinished,
    IterationDone,
    StopWhen,
    UnitDone,
    UnitKind,
    UpdateCommitted,
)
from rollplex.protocol.common import ErrorReport, Kind, Role
from rollplex_coordinator.http.app import create_app
from rollplex_coordinator.http.control import Control
from rollplex_coordinator.http.listening import listen
from rollplex_coordinator.http.server import Server
from rollplex_coordinator.http.streams import StreamSettings
from rollplex_coordinator.http.views import (
    BudgetView,
    CheckpointView,
    DigestsView,
    DigestView,
    HealthPart,
    HealthView,
    IterationView,
    LeaseRequestView,
    LeaseView,
    LedgerView,
    ServiceView,
    StatusView,
    SwapView,
    TrackerView,
    WaitView,
)
from rollplex_coordinator.records.journal import Journal

TOKEN = "a-token-of-this-test-run-0123456789abcdef"  # noqa: S105 - of a server that lives as long as the test
QUICK = StreamSettings(poll_s=0.01, keepalive_s=0.05, max_streams=3, batch_rows=7)


class FakeControl:
    """Notes every call in `calls`; raises `error` if it is set."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.error: Exception | None = None
        self.parts: tuple[HealthPart, ...] = (HealthPart(name="trainer[0:0]", ok=True),)
        self.digest = "same"

    def _note(self, *call: object) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    def start(self, count: int) -> StatusView:
        self._note("start", count)
        return self._status()

    def stop(self, *, when: StopWhen, exit: bool) -> StatusView:  # noqa: A002 - the API's word
        self._note("stop", when, exit)
        return self._status()

    def status(self) -> StatusView:
        self._note("status")
        return self._status()

    def _status(self) -> StatusView:
        wait = WaitView(awaited="unit 3", source="rollout[0:0]", age_s=1.5, since_wall_s=100.0, deadline_s=60.0)
        return StatusView(
            run="r1",
            phase="ROLLOUT",
            step=4,
            version=4,
            iterations_wanted=10,
            iterations_done=4,
            schedule="overlap",
            started_wall_s=1.0,
            waiting=(wait,),
            trackers=(TrackerView(name="wandb", state="ready", detail="offline", dropped_rows=3),),
        )

    def iterations(self, first: int, limit: int) -> tuple[IterationView, ...]:
        self._note("iterations", first, limit)
        return (self._iteration(first),)

    def iteration(self, step: int) -> IterationView | None:
        self._note("iteration", step)
        return self._iteration(step) if step < 5 else None

    def _iteration(self, step: int) -> IterationView:
        metrics: dict[str, float | None] = {"reward": 0.5, "kl": float("nan")}
        return IterationView(step=step, state="running", version=step, rows=(1, 2), started_wall_s=1.0, metrics=metrics)

    def ledger(self) -> LedgerView:
        self._note("ledger")
        lease = LeaseView(
            lease=1, kind=Kind.ACTOR_WEIGHTS, owner="trainer", device="0:0", size_bytes=64, held_bytes=60, segment=1
        )
        waiting = LeaseRequestView(kind=Kind.WORKSPACE, owner="prefix", device="0:0", size_bytes=100)
        budget = BudgetView(device="0:0", budget_bytes=128, leased_bytes=64, peak_bytes=96)
        return LedgerView(devices=(budget,), leases=(lease,), waiting=(waiting,))

    def services(self) -> tuple[ServiceView, ...]:
        self._note("services")
        return (
            ServiceView(service="trainer[0:0]", role=Role.TRAINER, device="0:0", incarnation=1, pid=7, state="busy"),
            ServiceView(service="prefix[0:0]", role=Role.PREFIX, device="0:0", incarnation=2, pid=8, state="dead"),
        )

    def swap(self, role: Role, command: tuple[str, ...]) -> SwapView:
        self._note("swap", role, command)
        return SwapView(role=role, command=command, state="testing")

    def digests(self) -> DigestsView:
        self._note("digests")
        mine = DigestView(service="trainer[0:0]", version=4, digest="same")
        return DigestsView(digests=(mine, DigestView(service="prefix[0:0]", version=4, digest=self.digest)))

    def checkpoints(self) -> tuple[CheckpointView, ...]:
        self._note("checkpoints")
        return (CheckpointView(step=2, version=2, folder="step_2", size_bytes=10, saved_wall_s=1.0),)

    def checkpoint(self) -> StatusView:
        self._note("checkpoint")
        return self._status()

    def health(self) -> HealthView:
        self._note("health")
        return HealthView(parts=self.parts)


class Site:
    """A running server, its control and its journal."""

    def __init__(self, folder: Path, streams: StreamSettings) -> None:
        self.control = FakeControl()
        self.journal = Journal(folder / "journal.sqlite")
        control: Control = self.control
        self.app = create_app(control, self.journal.path, TOKEN, ["coordinator"], streams=streams)
        self.server = Server(self.app, listen("127.0.0.1", 0))

    def client(self, **headers: str) -> httpx.Client:
        """A client with the token."""
        headers = {"Authorization": f"Bearer {TOKEN}"} | headers
        return httpx.Client(base_url=self.server.url, headers=headers, timeout=20, trust_env=False)

    def __enter__(self) -> Self:
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        self.journal.close()


def fill(site: Site) -> None:
    """Events of one step in its journal, one of each kind that metrics count."""
    generate = UnitKind.GENERATE
    site.journal.append(UnitDone(step=1, kind=generate, unit=0, service="r", start_s=1.0, end_s=3.5, vision_prompts=4))
    site.journal.append(UnitDone(step=1, kind=generate, unit=1, service="r", start_s=3.5, end_s=4.0, vision_prompts=2))
    site.journal.append(GroupFinished(step=1, group=0, row=3, lengths=(5, 7, 9), end_s=4.0))
    site.journal.append_durable(UpdateCommitted(step=1, version=1, digest="d", start_s=5.0, end_s=5.25))
    site.journal.append(IterationDone(step=1, version=1, metrics={"reward": 0.25, "kl": None}))
    site.journal.append(EvalDone(step=1, version=1, name="held-out", metrics={"accuracy": 0.9}))
    site.journal.append(ErrorRaised(error=ErrorReport(kind="RewardError", what="it raised"), phase="TRAIN"))
    site.journal.flush()
