"""The sizes of one device (`memory.device_sizes`) for a plan, from shapes and degrees alone.

Owns: what a plan asks beside what a run does: weights, gradients and passes of baselines, which store and compute them
another way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rollplex.layout.optimizer import optimizer_table
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.rank import rank_table, unsplit
from rollplex.layout.parallel.tally import Tally, tally_model
from rollplex.layout.parallel.training import rank_training_table
from rollplex.layout.parameters import ITEM_BYTES, ParameterTable, gradient_table, parameter_table
from rollplex.layout.shape import ModelShape
from rollplex.protocol.inputs import DataChecked
from rollplex_coordinator.memory.device_sizes import DeviceSizes
from rollplex_coordinator.planning.question import Question, share_of


class RankSizes(DeviceSizes):
    """Of one device that is a training rank and a rollout rank, on one storage of the weights."""

    def __init__(self, question: Question) -> None:
        config, shape, dtype = question.config, question.shape, question.config.model.dtype
        training, rollout = question.training_layout, question.rollout_layout
        parts = _parts(shape, training, rollout, dtype, config.model.freeze_vision)
        super().__init__(
            config,
            shape=shape,
            training=training,
            rollout=rollout,
            shard=parts.training,
            shares=(share_of(config, question.replicas), share_of(config, question.engines)),
            longest_prompt=question.prompt_tokens,
        )
        if question.gpus > 1:  # the state of a rank is of parts, that of one device of fused parameters
            optimizer = config.optimizer
            self.optimizer_bytes = optimizer_table(
                parts.apart, name=optimizer.name, momentum=optimizer.momentum
            ).total_bytes
        self.tally = parts.tally
        self.weights_bytes = self.tally.stored
        self.rollout_weights_bytes = parts.rollout_bytes
        self.baseline_gradient_bytes = gradient_table(
            self.trained, dtype=question.baseline_gradients or dtype
        ).total_bytes
        self.unsplit_bytes = parts.unsplit_bytes
        """Weights that every rank has whole."""

    @property
    def training_weights_bytes(self) -> int:
        """Of a training shard that is stored for itself."""
        return self.trained.total_bytes

    def whole_sequences(self, data: DataChecked, count: int) -> dict[str, int]:
        """Of a system without prefixes: what one pass over `count` sequences holds, each a longest prompt with a
        longest response. The pass keeps what `memory.prefix_activations` says."""
        formulas, train = self.wants.passes, data.sources[0]
        longest = formulas.config.rollout.longest_response
        tokens = train.max_prompt_tokens + longest
        frame = [(1, 2, max(2, train.max_media_rows // 2))] * (count if train.max_media_rows else 0)
        rows_bytes = count * longest * ITEM_BYTES[formulas.dtype] * formulas.shape.hidden
        sizes = {
            "graph": formulas.activations(count, tokens, frame) + rows_bytes,
            "logits": formulas.logits(count, [longest] * count),
        }
        if formulas.on_gpu:
            sizes["scratch"] = formulas.scratch(rows=count, tokens=count * tokens, longest=tokens, grids=frame)
        return sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """What depends on the model and the degrees only: a search asks for it hundreds of times."""

    training: ParameterTable
    apart: ParameterTable
    """The same with fused parameters in parts."""
    rollout_bytes: int
    tally: Tally
    unsplit_bytes: int


@lru_cache(maxsize=16)
def _parts(
    shape: ModelShape, training: TrainingLayout, rollout: RolloutLayout, dtype: str, freeze_vision: bool
) -> _Parts:
    whole = parameter_table(shape, dtype=dtype, freeze_vision=freeze_vision)
    return _Parts(
        training=rank_table(whole, shape, training),
        apart=rank_training_table(whole, shape, training),
        rollout_bytes=rank_table(whole, shape, rollout).total_bytes,
        tally=tally_model(shape, training, rollout, dtype=dtype),
        unsplit_bytes=sum(entry.size_bytes for entry in unsplit(whole, shape)),
    )
