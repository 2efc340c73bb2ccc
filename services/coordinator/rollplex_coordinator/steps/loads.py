"""The messages that have each process load: which segments it maps, where it stands among the others.

Owns their making. Does not know who has answered, nor what a segment holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from rollplex.config import wire
from rollplex.config.config import Config
from rollplex.protocol.common import Device, ModelSpec, Parallel, Role
from rollplex.protocol.prefix import LoadPrefix
from rollplex.protocol.rollout import EngineSpec, LoadRollout
from rollplex.protocol.trainer import LoadTrainer, Restore, Standing
from rollplex_coordinator.decisions.fleet import WORKERS, Fleet, Team
from rollplex_coordinator.memory.caps import Caps
from rollplex_coordinator.processes.node import MEET
from rollplex_coordinator.steps.segments import StandingSegments

Load: TypeAlias = Callable[[int, int], LoadTrainer | LoadPrefix | LoadRollout]
"""Makes a message from a cause and a rank."""
COLLECTIVE_MARGIN_S = 30.0
"""Beyond the coordinator's longest deadline, which begins anew with a sign of life and is looked at twice a second."""


class Loads:
    """By team: what `link.call_teams` takes.

    Args:
        spec: the model, as all must see it.
        engine: that samples.
        caps: of private memory, by device; nobody has one where there is none.
        restore: the checkpoint that a run goes on from.
        standing: what trainers find filled, by device, instead of filling it.
        meets: of `meeting_files`.
    """

    def __init__(
        self,
        config: Config,
        *,
        spec: ModelSpec,
        engine: EngineSpec,
        segments: StandingSegments,
        caps: Mapping[Device, Caps],
        restore: Restore | None,
        meets: Mapping[Role, str],
        standing: Mapping[Device, Standing] | None = None,
    ) -> None:
        self._config, self._spec, self._engine = config, spec, engine
        self._segments, self._caps, self._restore, self._meets = segments, caps, restore, meets
        self._standing = standing or {}

    def again(self, standing: Mapping[Device, Standing], meets: Mapping[Role, str]) -> Loads:
        """The same for new processes over what stands."""
        return Loads(
            self._config,
            spec=self._spec,
            engine=self._engine,
            segments=self._segments,
            caps=self._caps,
            restore=None,
            meets=meets,
            standing=standing,
        )

    @property
    def all(self) -> list[tuple[Team, Load]]:
        """Of the whole fleet, in the order in which they are sent."""
        fleet = self._segments.fleet
        return [
            *((team, self._trainer(team)) for team in fleet.trainers),
            *((team, self._prefix(team)) for team in fleet.prefixes),
            *((team, self._rollout(team)) for team in fleet.engines),
        ]

    def _trainer(self, team: Team) -> Callable[[int, int], LoadTrainer]:
        def make(cause: int, rank: int) -> LoadTrainer:
            here = self._segments.on[team.devices[rank]]
            assert here.gradients, "a device that trains has arenas"
            assert here.prefix_gradients, "two of them"
            assert here.state, "and a state"
            return LoadTrainer(
                cause=cause,
                model=self._spec,
                actor=here.actor,
                reference=here.reference,
                gradients=here.gradients,
                prefix_gradients=here.prefix_gradients,
                optimizer_state=here.state,
                algorithm=wire.algorithm(self._config),
                optimizer=wire.optimizer(self._config),
                restore=self._restore,
                standing=self._standing.get(team.devices[rank]),
                parallel=self._parallel(team, rank),
                shards=self._segments.shards(team, rank),
                private_bytes=self._caps_on(team.devices[rank]).trainer,
            )

        return make

    def _prefix(self, team: Team) -> Callable[[int, int], LoadPrefix]:
        def make(cause: int, rank: int) -> LoadPrefix:
            here = self._segments.on[team.devices[rank]]
            assert here.prefix_gradients, "a device that trains has arenas"
            return LoadPrefix(
                cause=cause,
                model=self._spec,
                actor=here.actor,
                reference=here.reference,
                gradients=here.prefix_gradients,
                temperature=self._config.rollout.temperature,
                parallel=self._parallel(team, rank),
                private_bytes=self._caps_on(team.devices[rank]).prefix,
            )

        return make

    def _rollout(self, team: Team) -> Callable[[int, int], LoadRollout]:
        def make(cause: int, rank: int) -> LoadRollout:
            device = team.devices[rank]
            return LoadRollout(
                cause=cause,
                model=self._spec,
                actor=self._segments.on[device].actor,
                engine=replace(self._engine, private_bytes=self._caps_on(device).rollout),
                parallel=self._parallel(team, rank),
            )

        return make

    def _caps_on(self, device: Device) -> Caps:
        return self._caps.get(device, Caps())

    def _parallel(self, team: Team, rank: int) -> Parallel:
        """Whoever hangs in a collective is to be named by the coordinator, which waits less long."""
        if team.role not in self._meets:
            return Parallel()
        deadlines = self._config.deadlines
        longest = max(deadlines.load_s, deadlines.unit_s, deadlines.update_s, deadlines.checkpoint_s)
        return team.met(rank, self._meets[team.role], longest + COLLECTIVE_MARGIN_S)


def meeting_files(run_dir: Path, fleet: Fleet) -> dict[Role, str]:
    """For each role a file that is not there yet, by which its processes find each other; none where all are alone."""
    if fleet.single:
        return {}
    return {
        role: str(next(file for n in count(1) if not (file := run_dir / f"{MEET}.{role}.{n}").exists()))
        for role in WORKERS
    }
