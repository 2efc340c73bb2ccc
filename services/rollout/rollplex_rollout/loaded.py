"""What LoadRollout makes: the mapped weights, their header, and the engine over them.

Owns: which engine has which name, and what the segment of a device holds. Does not know units, nor when anything runs;
imports no tensor library (the engine does).
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rollplex.errors import ConfigError
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import DevicePlan, plan
from rollplex.layout.parameters import ParameterTable
from rollplex.layout.shape import ModelShape
from rollplex.memory.header import HeaderPage
from rollplex.memory.segment import Mapping
from rollplex.protocol.common import Parallel, Role, SegmentRef
from rollplex.protocol.rollout import LoadRollout
from rollplex.worker.agreement import agreed_model, own_device
from rollplex_rollout.engine import Engine, EngineFactory, Setup


class Attach(Protocol):
    """What the service needs of `rollplex.worker.Segments`."""

    run_id: str
    run_dir: Path | None

    def attach(self, ref: SegmentRef) -> Mapping: ...

    def descriptor(self, ref: SegmentRef) -> int: ...

    def detach(self, segment: int) -> None: ...


class LoadedRollout:
    """What LoadRollout makes: the mapped weights, their header, and the engine over them."""

    def __init__(self, message: LoadRollout, segments: Attach, make_engine: EngineFactory) -> None:
        spec = message.model
        agreed = agreed_model(spec)
        table, shape = agreed.table, agreed.shape
        self.setup = Setup(
            spec=spec,
            shape=shape,
            table=table,
            weights=LentWeights(segments, message.actor),
            engine=message.engine,
            run_dir=segments.run_dir,
            parallel=message.parallel,
            device=_planned(message.parallel, table, shape),
        )
        self.engine = make_engine(self.setup)
        self.header = HeaderPage(self.engine.actor, run_id=segments.run_id, table_hash=table.hash)


def _planned(parallel: Parallel, table: ParameterTable, shape: ModelShape) -> DevicePlan | None:
    """What the device's segment holds. None: the whole model, as the table says.

    Raises:
        ConfigError: degrees that the model cannot be split by.
        StateError: the plan gives this process's device another rank.
    """
    if parallel.training == parallel.rollout == 1:
        return None
    layouts = TrainingLayout(degree=parallel.training), RolloutLayout(degree=parallel.rollout)
    return own_device(plan(table, shape, *layouts).devices, parallel, Role.ROLLOUT)


class LentWeights:
    """The weights segment of one LoadRollout (`rollplex_rollout.engine.Weights`)."""

    def __init__(self, segments: Attach, ref: SegmentRef) -> None:
        self._segments = segments
        self._ref = ref

    @property
    def ref(self) -> SegmentRef:
        return self._ref

    def mapping(self) -> Mapping:
        return self._segments.attach(self._ref)

    def descriptor(self) -> int:
        return self._segments.descriptor(self._ref)


def named_engine(setup: Setup) -> Engine:
    """The engine that was asked for; only it is imported, because each is heavy.

    Raises:
        ConfigError: there is none of that name.
    """
    match setup.engine.name:
        case "transformers":
            from rollplex_rollout.transformers_engine import TransformersEngine  # noqa: PLC0415

            return TransformersEngine(setup)
        case "sglang":
            from rollplex_rollout.sglang.starting import start  # noqa: PLC0415

            return start(setup)
        case "replay":
            from rollplex_rollout.replay import ReplayEngine  # noqa: PLC0415

            return ReplayEngine(setup)
        case name:
            raise ConfigError(
                "There is no such rollout engine", got=repr(name), needed="transformers, sglang or replay"
            )
