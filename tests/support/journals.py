"""Journals with chosen times: what a run of known length would have left."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollplex.journal import events
from rollplex.journal.events import Event, UnitKind, encode, step_of, type_of
from rollplex.protocol.common import Device, Kind, Role
from rollplex_coordinator.records.journal_file import open_file

DEVICE = Device(node=0, index=0)
WALL_S = 1_700_000_000.0
"""The wall clock when CLOCK_MONOTONIC was 0."""
STEP_S = 0.2
"""How long one iteration of `iteration` takes, with the time to the next."""
EVERYTHING = 1_000


class JournalScript:
    """Writes events at times of its own choice. `path`: journal.sqlite of a run directory."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "journal.sqlite"
        self._connection = open_file(self.path)
        (self._id,) = self._connection.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()

    def at(self, monotonic_s: float, event: Event) -> None:
        """One event, journalled at this moment."""
        self._id += 1
        row = (self._id, WALL_S + monotonic_s, monotonic_s, step_of(event), type_of(event), encode(event))
        self._connection.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", row)

    def start(self, at_s: float, *, boot: str = "boot-1", resumed: bool = False) -> None:
        """The run starts, and its phase LOAD."""
        self.at(
            at_s,
            events.RunStarted(
                run="digits-1",
                pid=1,
                host="h",
                boot_id=boot,
                seed=0,
                schedule="overlap",
                share_prefix=True,
                config_digest="d",
                resumed=resumed,
            ),
        )
        self.phase(at_s, "LOAD")

    def phase(self, at_s: float, name: str, step: int | None = None) -> None:
        self.at(at_s, events.PhaseEntered(phase=name, start_s=at_s, step=step))

    def iteration(self, step: int, t: float, *, upto: float = EVERYTHING) -> None:
        """Two groups under `overlap` from `t` on; events journalled later than `t + upto` are not there.

        rollout   |prefill .02-.04| decode .04-.10 |     prefix   ref .03-.05, actor .05-.07, .07-.09, score .10-.12
        trainer   suffix .12-.13, .13-.14; vote .160-.161, optimizer .163-.168   prefix backward .13-.14, .14-.15
        UPDATE    .16-.18, BEGIN .162, COMMIT .17                  iteration done .18
        """
        for after_s, event in sorted(self._events(step, t), key=lambda item: item[0]):
            if after_s <= upto:
                self.at(t + after_s, event)

    def _events(self, step: int, t: float) -> list[tuple[float, Event]]:
        def phase(after_s: float, name: str) -> tuple[float, Event]:
            return after_s, events.PhaseEntered(phase=name, start_s=t + after_s, step=step)

        def unit(kind: UnitKind, span: tuple[float, float], number: int, *groups: int) -> tuple[float, Event]:
            service = {
                UnitKind.GENERATE: "rollout[0:0]",
                UnitKind.SUFFIX: "trainer[0:0]",
                UnitKind.VOTE: "trainer[0:0]",
            }.get(kind, "prefix[0:0]")
            done = events.UnitDone(
                step=step,
                kind=kind,
                unit=number,
                service=service,
                start_s=t + span[0],
                end_s=t + span[1],
                groups=groups,
                decode_start_s=t + 0.04 if kind is UnitKind.GENERATE else None,
            )
            return span[1] + 0.0005, done

        def group(number: int, end_s: float) -> list[tuple[float, Event]]:
            row = step * 2 + number
            return [
                (end_s, events.GroupFinished(step=step, group=number, row=row, lengths=(3, 4), end_s=t + end_s)),
                (
                    end_s + 0.006,
                    events.GroupRewarded(
                        step=step,
                        group=number,
                        row=row,
                        mean=0.5,
                        std=None,
                        start_s=t + end_s + 0.001,
                        end_s=t + end_s + 0.005,
                    ),
                ),
            ]

        lease: dict[str, Any] = {"owner": "rollout", "device": DEVICE, "size_bytes": 1_000, "step": step}
        return [
            (0.0, events.IterationStarted(step=step, version=step, rows=(step * 2, step * 2 + 1))),
            phase(0.01, "ROLLOUT"),
            (0.015, events.LeaseGranted(lease=step + 1, kind=Kind.ROLLOUT_KV, **lease)),
            unit(UnitKind.REFERENCE_PREFIX, (0.03, 0.05), 0, 0, 1),
            *group(0, 0.06),
            unit(UnitKind.ACTOR_PREFIX, (0.05, 0.07), 0, 0),
            unit(UnitKind.ACTOR_PREFIX, (0.07, 0.09), 1, 1),
            *group(1, 0.1),
            unit(UnitKind.GENERATE, (0.02, 0.1), 0, 0, 1),
            (0.101, events.LeaseReleased(lease=step + 1, kind=Kind.ROLLOUT_KV, **lease)),
            phase(0.1015, "SCORE"),
            unit(UnitKind.SCORE, (0.102, 0.11), 0, 0),
            unit(UnitKind.SCORE, (0.111, 0.12), 1, 1),
            phase(0.1205, "TRAIN"),
            unit(UnitKind.SUFFIX, (0.121, 0.13), 0, 0),
            unit(UnitKind.PREFIX_BACKWARD, (0.131, 0.14), 0, 0),
            unit(UnitKind.SUFFIX, (0.131, 0.139), 1, 1),
            unit(UnitKind.PREFIX_BACKWARD, (0.141, 0.15), 1, 1),
            phase(0.16, "UPDATE"),
            unit(UnitKind.VOTE, (0.16, 0.161), 0),
            (0.162, events.UpdateBegin(step=step, version=step)),
            (
                0.17,
                events.UpdateCommitted(step=step, version=step + 1, digest="abc", start_s=t + 0.163, end_s=t + 0.168),
            ),
            phase(0.18, "IDLE"),
            (
                0.181,
                events.IterationDone(step=step, version=step + 1, metrics={"reward": 0.5, "kl": None, "loss": 0.25}),
            ),
        ]

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def started(at_s: float, role: Role) -> tuple[float, Event]:
    """A service's process was started."""
    service = f"{role}[0:0]"
    return at_s, events.ServiceStarted(service=service, role=role, device=DEVICE, incarnation=1, pid=2)


def run_of(run_dir: Path, iterations: int) -> Path:
    """A whole run: start at 10 s, ready at 11 s, iterations from 11 s on, an orderly end. Its journal."""
    with JournalScript(run_dir) as script:
        script.start(10.0)
        script.at(10.5, events.StageDone(name="data check", start_s=10.1, end_s=10.5))
        script.at(
            10.6,
            events.LeaseGranted(
                lease=0, kind=Kind.ACTOR_WEIGHTS, owner="trainer", device=DEVICE, size_bytes=5_000, segment=1
            ),
        )
        script.phase(10.9, "IDLE")
        for step in range(iterations):
            script.iteration(step, 11.0 + step * STEP_S)
        script.at(11.0 + iterations * STEP_S, events.RunEnded(run="digits-1", exit_code=0, reason="done"))
        return script.path
