"""What each engine and each replica is doing in one step: one unit at a time, in the order of its ids. Pure.

Keeps the places; when the next unit may begin is the schedule's to decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollplex.protocol.prefix import Which
from rollplex_coordinator.decisions.instructions import Backward, Forward, Score
from rollplex_coordinator.decisions.plan import PrefixUnit, StepPlan


@dataclass(kw_only=True)
class EngineLane:
    """One engine. `units`: its decode units."""

    units: tuple[int, ...]
    done: int = 0
    running: int | None = None
    prefilled: bool = False
    """Every prompt of the running unit has its first token."""

    @property
    def over(self) -> bool:
        return self.done == len(self.units)

    def begin(self) -> int:
        """The next unit, which runs from now on."""
        self.running, self.prefilled = self.units[self.done], False
        return self.running

    def end(self) -> None:
        self.running = None
        self.done += 1


@dataclass(kw_only=True)
class ReplicaLane:
    """One replica: its prefix team and its trainer team.

    prefix, suffix: its units. order: in which its prefix units ask for memory.
    """

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    order: tuple[tuple[Which, int], ...]
    asked: int = 0
    granted: list[tuple[Which, int]] = field(default_factory=list)
    forwarded: int = 0
    trained: int = 0
    backward: int = 0
    job: Forward | Score | Backward | None = None
    """What the prefix team does now."""
    training: int | None = None
    """The suffix unit that the trainer team is at."""

    @property
    def over(self) -> bool:
        return self.backward == len(self.prefix)

    @property
    def next_suffix(self) -> int | None:
        """The suffix unit to be trained next."""
        return self.suffix[self.trained] if self.trained < len(self.suffix) else None

    def trained_all_of(self, unit: PrefixUnit) -> bool:
        """Whether every suffix unit of a prefix unit of this replica is trained."""
        following = self.next_suffix
        return following is None or unit.suffix[-1] < following


def engine_lanes(plan: StepPlan) -> tuple[EngineLane, ...]:
    """By engine; one without units has nothing to do in this step."""
    return tuple(EngineLane(units=plan.decode_of(engine)) for engine in range(plan.engines))


def replica_lanes(plan: StepPlan, kinds: Sequence[Which]) -> tuple[ReplicaLane, ...]:
    """By replica. `kinds`: of prefix forwards, in the order in which they ask for memory."""
    return tuple(
        ReplicaLane(
            prefix=plan.prefix_of(replica),
            suffix=plan.suffix_of(replica),
            order=tuple((which, unit) for which in kinds for unit in plan.prefix_of(replica)),
        )
        for replica in range(plan.replicas)
    )
