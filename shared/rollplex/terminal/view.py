"""What the table of a run shows, as plain values, and how they follow from what a coordinator tells. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

WORTH_TELLING_S = 1.0
"""A wait is shown from this age on: shorter ones are the work itself."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of an iteration, or of a phase: of the last one, and the median of the last ones."""

    name: str
    last_s: float
    median_s: float


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The newest result of one evaluation. values: what was measured, and how much."""

    name: str
    step: int
    values: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One device."""

    device: str
    leased_bytes: int
    budget_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Something that is waited for."""

    what: str
    source: str
    age_s: float


@dataclass(frozen=True, kw_only=True)
class View:
    """A run at one moment. None: not known yet."""

    run: str
    schedule: str
    phase: str
    done: int
    wanted: int
    version: int
    stopping: str
    elapsed_s: float
    left_s: float | None
    reward: float | None
    hidden: float | None
    """Share of the prefix time that lay inside the rollout, 0 to 1."""
    timings: tuple[Timing, ...]
    evaluations: tuple[Evaluation, ...]
    memory: tuple[Memory, ...]
    services: tuple[tuple[str, str], ...]
    """Role and state."""
    waits: tuple[Wait, ...]


# --- what a coordinator tells: its own views, or what the control API answers --------------------------------------


class _Wait(Protocol):
    @property
    def awaited(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def age_s(self) -> float: ...


class _Status(Protocol):
    @property
    def run(self) -> str: ...
    @property
    def phase(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def iterations_wanted(self) -> int: ...
    @property
    def iterations_done(self) -> int: ...
    @property
    def schedule(self) -> str: ...
    @property
    def stopping(self) -> str | None: ...
    @property
    def started_wall_s(self) -> float: ...
    @property
    def waiting(self) -> Sequence[_Wait]: ...


class _Device(Protocol):
    @property
    def device(self) -> str: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def leased_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...


class _Service(Protocol):
    @property
    def role(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def state(self) -> str: ...


class _Pace(Protocol):
    @property
    def reward(self) -> float | None: ...
    @property
    def hidden(self) -> float | None: ...
    @property
    def timings(self) -> tuple[Timing, ...]: ...
    def left_s(self, iterations: int) -> float | None: ...


def assemble(
    status: _Status,
    devices: Iterable[_Device],
    services: Iterable[_Service],
    *,
    pace: _Pace,
    evaluations: Iterable[Evaluation],
    now_wall_s: float,
) -> View:
    """One view of what was told. `now_wall_s`: seconds since 1970."""
    every = list(services)
    return View(
        run=status.run,
        schedule=status.schedule,
        phase=status.phase,
        done=status.iterations_done,
        wanted=status.iterations_wanted,
        version=status.version,
        stopping=status.stopping or "",
        elapsed_s=max(0.0, now_wall_s - status.started_wall_s),
        left_s=pace.left_s(status.iterations_wanted - status.iterations_done),
        reward=pace.reward,
        hidden=pace.hidden,
        timings=pace.timings,
        evaluations=tuple(evaluations),
        memory=tuple(
            Memory(
                device=device.device,
                leased_bytes=device.leased_bytes,
                budget_bytes=device.budget_bytes,
                peak_bytes=device.peak_bytes,
            )
            for device in devices
        ),
        services=tuple((_name(service, every), service.state) for service in every),
        waits=tuple(
            Wait(what=wait.awaited, source=wait.source, age_s=wait.age_s)
            for wait in status.waiting
            if wait.age_s >= WORTH_TELLING_S
        ),
    )


def evaluation(name: str, step: int, metrics: Mapping[str, float | None]) -> Evaluation:
    """What of an evaluation's metrics is shown: the mean reward and that of each function."""
    shown = ((_short(key), value) for key, value in metrics.items() if key == "reward" or key.startswith("rewards/"))
    return Evaluation(name=name, step=step, values=tuple((key, value) for key, value in shown if value is not None))


def _short(key: str) -> str:
    return key.removeprefix("rewards/").removesuffix("/mean")


def _name(service: _Service, every: Sequence[_Service]) -> str:
    """Its role, and its device where the role has several."""
    alone = sum(other.role == service.role for other in every) == 1
    return service.role if alone else f"{service.role}[{service.device}]"
