"""The ledger's sizes (`memory.sizes`) of one device among several: a rank of the trainer and a rank of an engine.

Owns: which share of the model and of an iteration each block is of. Formulas are those of `Sizes`.

    block                                    share of the model          share of the iteration
    ---------------------------------------  --------------------------  ------------------------
    actor weights                            the wider of both shards    -
    gradients, optimizer state, reference    training shard              -
    prefix, suffix, their scratch            training shard              prompts / replicas
    rollout K/V, engine scratch              rollout shard               prompts / engines
    inputs                                   -                           all of it, once a node
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.rank import rank_shape, rank_table, unsplit
from rollplex.layout.parallel.tally import Tally, tally_model
from rollplex.layout.parameters import ParameterTable, gradient_table, parameter_table, with_entries
from rollplex.layout.shape import ModelShape
from rollplex.protocol.common import Kind
from rollplex.protocol.inputs import DataChecked
from rollplex_coordinator.memory.sizes import ENGINE_SCRATCH, ROLLOUT_KV, TRAIN_WORKSPACE, Sizes
from rollplex_coordinator.planning.question import Question, share_of


class RankSizes(Sizes):
    """Of one device that is a training rank and a rollout rank, on one storage of the weights."""

    def __init__(self, question: Question) -> None:
        config, shape, dtype = question.config, question.shape, question.config.model.dtype
        training, rollout = question.training_layout, question.rollout_layout
        parts = _parts(shape, training, rollout, dtype, config.model.freeze_vision)
        super().__init__(
            share_of(config, question.replicas),
            shape=rank_shape(shape, training),
            table=parts.training,
        )
        self.tally = parts.tally
        self.weights_bytes = self.tally.stored
        self.rollout_weights_bytes = parts.rollout_bytes
        self.baseline_gradient_bytes = gradient_table(
            self.table, dtype=question.baseline_gradients or dtype
        ).total_bytes
        self.unsplit_bytes = parts.unsplit_bytes
        """Weights that every rank has whole."""
        self._node = Sizes(config, shape=shape, table=parts.none)
        self._engine = Sizes(
            share_of(config, question.engines),
            shape=rank_shape(shape, rollout),
            table=parts.none,
            longest_prompt=question.prompt_tokens,
        )

    def eager_train_bytes(self, data: DataChecked) -> int:
        """The train workspace of passes without `rollplex.model.fused`."""
        fused, self.fused = self.fused, False
        try:
            return super().bounds(data)[TRAIN_WORKSPACE]
        finally:
            self.fused = fused

    @property
    def training_weights_bytes(self) -> int:
        """Of a training shard that is stored for itself."""
        return self.table.total_bytes

    def bounds(self, data: DataChecked) -> dict[str, int]:
        """As of one device, but with the inputs of the whole node."""
        sampled = self._engine.bounds(data)
        own = {name: sampled[name] for name in (ROLLOUT_KV, ENGINE_SCRATCH) if name in sampled}
        return {**super().bounds(data), **own, Kind.INPUTS: self._node.bounds(data)[Kind.INPUTS]}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """What depends on the model and the degrees only: a search asks for it hundreds of times."""

    training: ParameterTable
    rollout_bytes: int
    tally: Tally
    unsplit_bytes: int
    none: ParameterTable
    """For sizes that are asked for nothing of the parameters."""


@lru_cache(maxsize=16)
def _parts(
    shape: ModelShape, training: TrainingLayout, rollout: RolloutLayout, dtype: str, freeze_vision: bool
) -> _Parts:
    whole = parameter_table(shape, dtype=dtype, freeze_vision=freeze_vision)
    return _Parts(
        training=rank_table(whole, shape, training),
        rollout_bytes=rank_table(whole, shape, rollout).total_bytes,
        tally=tally_model(shape, training, rollout, dtype=dtype),
        unsplit_bytes=sum(entry.size_bytes for entry in unsplit(whole, shape)),
        none=with_entries(whole, ()),
    )
