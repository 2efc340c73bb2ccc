"""The sizes of `memory.sizes` of one device among several: a rank of the trainer, a rank of an engine, or both.

Owns: which share of the model and of an iteration each block is of. What is computed of it is as for one device.

    block                                    share of the model          share of the iteration
    ---------------------------------------  --------------------------  ------------------------
    actor weights                            the wider of both shards    -
    gradients, optimizer state, reference    training shard              -
    prefix, suffix, their scratch            training shard              prompts / replicas
    rollout K/V, engine scratch              rollout shard               prompts / engines
    inputs                                   -                           all of it, once a node

Where ranks differ in a few bytes, what is planned is the largest; each gets what it needs (`segments_of`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from rollplex.config.config import Config
from rollplex.config.job import ParallelSection
from rollplex.layout.optimizer import optimizer_table
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import plan
from rollplex.layout.parallel.rank import rank_shape, rank_table
from rollplex.layout.parallel.training import gradient_plan, rank_training_table, reference_plan
from rollplex.layout.parameters import ParameterTable, parameter_table
from rollplex.layout.shape import ModelShape, read_shape
from rollplex.protocol.common import Parallel
from rollplex_coordinator.decisions.fleet import Fleet
from rollplex_coordinator.memory.formulas import Formulas
from rollplex_coordinator.memory.sizes import SegmentBytes, Shares, Sizes


def sizes_of(config: Config, fleet: Fleet, *, whole: bool = False, longest_prompt: int = 0) -> Sizes:
    """The sizes of a run, for each of its devices.

    Args:
        whole, longest_prompt: as `Sizes` takes them.

    Raises:
        ModelError: a model folder that cannot be used.
    """
    if fleet.single:
        return Sizes(config, whole=whole, longest_prompt=longest_prompt)
    return FleetSizes(config, fleet, longest_prompt=longest_prompt)


def share(config: Config, parts: int) -> Config:
    """What the busiest of `parts` replicas or engines has of an iteration, as the iteration of one device."""
    prompts = -(-config.data.prompts_per_iteration // parts)
    data = config.data.model_copy(update={"prompts_per_iteration": prompts})
    return config.model_copy(update={"data": data, "parallel": ParallelSection()})


class DeviceSizes(Sizes):
    """Of one device that is a training rank and a rollout rank.

    Args:
        shape: of the whole model.
        training, rollout: the layouts of passes and of the engine.
        shard: the parameters of a training rank.
        shares: what a replica and what an engine has of an iteration.
        longest_prompt: tokens.
        step: of a run: `config`, whose units are not cut at the border of a share.
    """

    def __init__(
        self,
        config: Config,
        *,
        shape: ModelShape,
        training: TrainingLayout,
        rollout: RolloutLayout,
        shard: ParameterTable,
        shares: tuple[Config, Config],
        longest_prompt: int,
        step: Config | None = None,
    ) -> None:
        replica, engine = shares
        super().__init__(
            replica,
            shares=Shares(
                passes=Formulas(config=replica, step=step or replica, shape=rank_shape(shape, training)),
                engine=Formulas(
                    config=engine,
                    step=step or engine,
                    shape=rank_shape(shape, rollout),
                    longest_prompt=longest_prompt,
                ),
                node=config,
            ),
            table=shard,
        )
        self.vocabulary = shape.vocab


class FleetSizes(DeviceSizes):
    """Of a run on several devices, of which each trains, samples or does both.

    Raises:
        ConfigError: degrees that the model cannot be split by.
    """

    def __init__(self, config: Config, fleet: Fleet, *, longest_prompt: int) -> None:
        shape, parallel = read_shape(config.model.path), config.parallel
        training = TrainingLayout(degree=parallel.training)
        whole = parameter_table(shape, dtype=config.model.dtype, freeze_vision=config.model.freeze_vision)
        super().__init__(
            config,
            shape=shape,
            training=training,
            rollout=RolloutLayout(degree=parallel.rollout),
            shard=rank_table(whole, shape, training),
            shares=(share(config, len(fleet.trainers)), share(config, len(fleet.engines))),
            longest_prompt=longest_prompt,
            step=config,
        )
        self.table = whole
        """Of the whole model: every device says its hash."""
        self._measure = _measure(whole, shape, config.optimizer.name, config.optimizer.momentum)
        held = [self.segments_of(place) for team in fleet.trainers for place in team.parallels]
        self.weights_bytes = max(one.actor for one in held)
        self.gradient_bytes = max(one.gradients for one in held)
        self.reference_bytes = max(one.reference for one in held)
        self.optimizer_bytes = max(one.state for one in held)

    def segments_of(self, parallel: Parallel) -> SegmentBytes:
        """As `Sizes`; of a rollout on a device that only samples, `actor` alone means something."""
        return self._measure(parallel.training, parallel.rollout, parallel.device, parallel.rank)


def _measure(
    table: ParameterTable, shape: ModelShape, optimizer: str, momentum: float
) -> Callable[[int, int, int, int], SegmentBytes]:
    """Segments by training and rollout degree, device of the plan, and training rank."""

    @cache
    def weights(training: int, rollout: int) -> tuple[int, ...]:
        layouts = plan(table, shape, TrainingLayout(degree=training), RolloutLayout(degree=rollout))
        return tuple(device.storage.total_bytes for device in layouts.devices)

    @cache
    def of_rank(training: int, rank: int) -> tuple[int, int, int]:
        layout = TrainingLayout(degree=training)
        gradients = gradient_plan(table, shape, layout).devices[rank]
        reference = reference_plan(table, shape, layout).devices[rank]
        state = optimizer_table(rank_training_table(table, shape, layout, rank), name=optimizer, momentum=momentum)
        return gradients.storage.total_bytes, reference.storage.total_bytes, state.total_bytes

    @cache
    def measure(training: int, rollout: int, device: int, rank: int) -> SegmentBytes:
        gradients, reference, state = of_rank(training, rank if rank < training else 0)
        actor = weights(training, rollout)[device]
        return SegmentBytes(actor=actor, gradients=gradients, reference=reference, state=state)

    return measure
