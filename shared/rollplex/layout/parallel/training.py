"""What a training rank has beside its device's weights: gradients, reference weights, optimizer state. Pure, no torch.

Each holds this rank's own shards and nothing else, so that its bytes do not depend on the rollout's degree. There is
one function for each, used by the sizes that are planned and by whoever fills them.

    gradients, reference    a plan of two equal layouts: q|k|v and gate|up of a rank adjacent, as in the parameter table
    optimizer state         by part: what `optimizer_table` makes of `rank_training_table`

Owns: which tables these are. Does not know: where weights lie, tensors.
"""

from __future__ import annotations

from dataclasses import replace

from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import LayoutPlan, plan
from rollplex.layout.parallel.split import splits
from rollplex.layout.parameters import ParameterTable, gradient_table, reference_table, with_entries
from rollplex.layout.shape import ModelShape


def rank_training_table(
    table: ParameterTable, shape: ModelShape, layout: TrainingLayout, rank: int = 0
) -> ParameterTable:
    """The parameters of the training layout that `rank` has: parts, contiguous shards, one after the other.

    Entries are in the order of the whole table and have the parts' names (`split.Part`) and no pieces; whether they are
    trained and decayed is as in `table`.

    Args:
        table: of the whole model. shape: of the whole model.
    """
    entries = [
        replace(split.entry, name=part.name, shape=split.local_shape(stop - start), pieces=(), tied=False)
        for split in splits(table, shape)
        for part in split.parts
        for start, stop in [layout.shard(split, part, rank)]
    ]
    return with_entries(table, entries)


def gradient_plan(
    table: ParameterTable, shape: ModelShape, layout: TrainingLayout, *, dtype: str | None = None
) -> LayoutPlan:
    """Where gradients lie in each rank's arena: trainable parts alone, shards and nothing else, no header.

    Args:
        table: of the weights.
        dtype: of the gradients; that of the weights unless given.

    Raises:
        ConfigError: as `rollplex.layout.parallel.plan.plan`.
    """
    return _own(gradient_table(table, dtype=dtype), shape, layout)


def reference_plan(table: ParameterTable, shape: ModelShape, layout: TrainingLayout) -> LayoutPlan:
    """Where each rank has the reference weights that differ from the actor's; frozen ones are read from the actor's
    segment. No header. Raises ConfigError as `gradient_plan`."""
    return _own(reference_table(table), shape, layout)


def _own(table: ParameterTable, shape: ModelShape, layout: TrainingLayout) -> LayoutPlan:
    """Of two equal layouts no storage is wider than a training shard."""
    same = RolloutLayout(degree=layout.degree, vision_sharded=layout.vision_sharded)
    return plan(table, shape, layout, same)
