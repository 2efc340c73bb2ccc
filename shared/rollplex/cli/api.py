"""The control API of a live run, asked from the command line: typed answers, a deadline for each, errors in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx
import msgspec
from msgspec import Struct

from rollplex.errors import ProtocolError, RollplexError, StateError, WaitError
from rollplex.protocol.claim import holder_of

ANSWER_S = 15.0
"""The coordinator itself gives up on a call after 10 s, with a better error than ours."""
CONNECT_S = 3.0
_KINDS: Mapping[int, type[RollplexError]] = {httpx.codes.CONFLICT: StateError, httpx.codes.GATEWAY_TIMEOUT: WaitError}
"""What the API's statuses mean; the rest is plainly an error."""
AnswerT = TypeVar("AnswerT")


class Wait(Struct, frozen=True, kw_only=True, rename={"awaited": "for", "source": "from"}):
    """Something that the coordinator waits for."""

    awaited: str
    source: str
    age_s: float
    since_wall_s: float
    deadline_s: float


class Gpu(Struct, frozen=True, kw_only=True):
    """A GPU of the run."""

    name: str
    sharing_asked: str
    sharing_used: str
    why: str
    total_bytes: int
    used_bytes: int | None
    overhead_bytes: int | None


class Tracker(Struct, frozen=True, kw_only=True):
    """A tracker of another maker."""

    name: str
    state: str
    detail: str
    dropped_rows: int


class Swap(Struct, frozen=True, kw_only=True):
    """The newest replacement of a service."""

    role: str
    command: tuple[str, ...]
    state: str
    case: str = ""
    got: str = ""
    needed: str = ""
    step: int | None = None


class Restart(Struct, frozen=True, kw_only=True):
    """The newest restart of all workers."""

    number: int
    allowed: int
    service: str
    how: str
    phase: str
    wall_s: float
    state: str
    step: int | None = None


class Status(Struct, frozen=True, kw_only=True):
    """Where the run stands (GET /status)."""

    run: str
    phase: str
    step: int
    version: int
    iterations_wanted: int
    iterations_done: int
    schedule: str
    stopping: str | None
    started_wall_s: float
    waiting: tuple[Wait, ...]
    gpus: tuple[Gpu, ...] = ()
    trackers: tuple[Tracker, ...] = ()
    restarts: int = 0
    restart: Restart | None = None
    swap: Swap | None = None


class Device(Struct, frozen=True, kw_only=True):
    """Memory of one device."""

    device: str
    budget_bytes: int
    leased_bytes: int
    reserved_bytes: int
    peak_bytes: int


class LeaseRequest(Struct, frozen=True, kw_only=True):
    """A request that waits for memory."""

    kind: str
    owner: str
    purpose: str
    device: str
    size_bytes: int


class Ledger(Struct, frozen=True, kw_only=True):
    """Budgets, and what waits for memory (GET /ledger, without the leases)."""

    devices: tuple[Device, ...]
    waiting: tuple[LeaseRequest, ...]


class Service(Struct, frozen=True, kw_only=True):
    """One service process (GET /services)."""

    service: str
    role: str
    device: str
    incarnation: int
    pid: int
    state: str
    busy_with: str
    log_path: str
    command: tuple[str, ...] = ()
    since_wall_s: float | None = None


class _Iteration(Struct, frozen=True, kw_only=True):
    step: int
    metrics: dict[str, float | None]


class _Refusal(Struct, frozen=True, kw_only=True):
    kind: str
    what: str
    got: str = ""
    needed: str = ""
    do: str = ""
    where: str = ""


class _RefusalBody(Struct, frozen=True, kw_only=True):
    error: _Refusal


class Api:
    """A client of one coordinator.

    Raises:
        WaitError: from every method: it does not answer (in time).
        StateError: from the methods that change something: the run's state does not allow it.
        RollplexError: it refused for another reason.
    """

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._client = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            trust_env=False,  # a proxy has no business between us and this machine
        )

    def status(self) -> Status:
        """Where the run stands."""
        return self._ask("GET", "/status", Status)

    def ledger(self) -> Ledger:
        """Who may hold how much memory."""
        return self._ask("GET", "/ledger", Ledger)

    def services(self) -> tuple[Service, ...]:
        """Every service process."""
        return self._ask("GET", "/services", tuple[Service, ...])

    def metrics_from(self, step: int, limit: int) -> list[tuple[int, dict[str, float | None]]]:
        """Metrics of the iterations from `step` on that are over, by their step."""
        found = self._ask("GET", f"/iterations?first={step}&limit={limit}", tuple[_Iteration, ...])
        return [(iteration.step, iteration.metrics) for iteration in found if iteration.metrics]

    def start(self, count: int) -> Status:
        """Want so many more iterations."""
        return self._ask("POST", "/iterations", Status, {"count": count})

    def stop(self, *, now: bool, leave: bool) -> Status:
        """Stop now or after the iteration, and end the run or stay."""
        return self._ask("POST", "/stop", Status, {"when": "now" if now else "after_iteration", "exit": leave})

    def swap(self, role: str, command: Sequence[str]) -> Swap:
        """Replace a service between two iterations, if the newcomer conforms."""
        return self._ask("POST", f"/services/{role}/swap", Swap, {"command": list(command)})

    def close(self) -> None:
        """End the connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, method: str, path: str, answer: type[AnswerT], body: Mapping[str, object] | None = None) -> AnswerT:
        try:
            response = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise WaitError(
                "The coordinator does not answer",
                got=f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
                needed=f"an answer within {ANSWER_S:.0f} s",
                do="`rollplex down` ends it all the same.",
                where=f"{method} {self._url}{path}",
            ) from error
        try:
            if response.status_code < httpx.codes.BAD_REQUEST:
                return msgspec.json.decode(response.content, type=answer)
            refusal = msgspec.json.decode(response.content, type=_RefusalBody).error
        except msgspec.DecodeError as error:
            if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                raise WaitError(
                    "The coordinator has too many connections at once to answer",
                    do="Try again soon. `rollplex down` ends the run all the same.",
                    where=f"{method} {self._url}{path}",
                ) from None
            raise ProtocolError(
                "What answers there is no coordinator of this version",
                got=f"status {response.status_code}: {error}",
                do="Use the version of Rollplex that started the run.",
                where=f"{method} {self._url}{path}",
            ) from error
        kind = _KINDS.get(response.status_code, RollplexError)
        raise kind(refusal.what, got=refusal.got, needed=refusal.needed, do=refusal.do, where=refusal.where)


def connect(run_dir: Path) -> Api:
    """A client of the coordinator that holds a run directory.

    Raises:
        StateError: nobody does: the run has ended.
        WaitError: it is only starting and does not answer yet.
    """
    holder = holder_of(run_dir)
    if holder is None:
        raise StateError(
            "The run is not going on",
            needed="a live coordinator",
            do="`rollplex status` says how it ended; `rollplex up CONFIG --serve` starts one that takes instructions.",
            where=str(run_dir),
        )
    try:
        address = json.loads((run_dir / "http.json").read_text(encoding="utf-8"))
        url, run = str(address["url"]), str(address["run"])
        token = (run_dir / "token").read_text(encoding="ascii").strip()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _starting(run_dir, str(error)) from error
    if run != holder.run_id:
        raise _starting(run_dir, f"the address of {run}, which has ended")
    return Api(url, token)


def _starting(run_dir: Path, got: str) -> WaitError:
    return WaitError(
        "The coordinator is only starting: it does not answer yet",
        got=got,
        needed="http.json and token of the run",
        do="Ask again in a second.",
        where=str(run_dir),
    )
