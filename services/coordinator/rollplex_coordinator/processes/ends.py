"""How the end of a worker is raised: it reported an error, or its process is gone."""

from __future__ import annotations

from rollplex.errors import RollplexError, ServiceDied
from rollplex.protocol.common import Device, ErrorReport, Role
from rollplex_coordinator.decisions.fleet import DEVICE
from rollplex_coordinator.processes.hub import Peer


class WorkerFailed(RollplexError):  # noqa: N818 - it names what happened
    """A worker reported an error; carries the worker's own parts."""

    def __init__(self, peer: Peer, report: ErrorReport) -> None:
        super().__init__(report.what, got=report.got, needed=report.needed, do=report.do, where=report.where)
        self.peer = peer
        self.report = report


class WorkerDied(ServiceDied):
    """A worker's process ended while it was needed."""

    def __init__(
        self, what: str, *, role: Role, got: str, needed: str, do: str, where: str, device: Device = DEVICE
    ) -> None:
        super().__init__(what, got=got, needed=needed, do=do, where=where)
        self.role = role
        self.device = device
