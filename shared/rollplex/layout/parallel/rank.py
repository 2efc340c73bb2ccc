"""One tensor-parallel rank's share of a model, as a shape and as a table: so that whatever counts bytes of a model
counts those of a rank.

Owns: which numbers of a shape a rank has a share of. Does not know: bytes of passes, devices, where anything lies.

    a share         heads, K/V heads (a whole one at least), columns of the MLPs, of training rows of the vocabulary
    on every rank   what is `hidden` wide: inputs of layers and norms, there being no sequence parallelism
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.places import shards
from rollplex.layout.parallel.split import splits
from rollplex.layout.parameters import VOCAB_MULTIPLE, ParameterTable, Stored, vision_mlp_width, with_entries
from rollplex.layout.shape import ModelShape
from rollplex.layout.vision import VisionShape


def rank_shape(shape: ModelShape, layout: TrainingLayout | RolloutLayout) -> ModelShape:
    """What passes compute with on one rank; `refusals.check` says whether the model can be split so.

    A rollout rank has logits of the whole vocabulary, which are gathered for sampling.
    """
    degree = layout.degree
    if degree == 1:
        return shape
    rows = -(-shape.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return replace(
        shape,
        heads=shape.heads // degree,
        kv_heads=max(1, shape.kv_heads // degree),
        intermediate=shape.intermediate // degree,
        vocab=rows // degree if isinstance(layout, TrainingLayout) else shape.vocab,
        vision=_rank_vision(shape.vision, degree) if layout.vision_sharded else shape.vision,
    )


def rank_table(
    table: ParameterTable, shape: ModelShape, layout: TrainingLayout | RolloutLayout, rank: int = 0
) -> ParameterTable:
    """The parameters of one rank, its own shards only, placed one after the other.

    Args:
        table: of the whole model. shape: of the whole model.
    """
    entries = list[Stored]()
    for split in splits(table, shape):
        size = sum(stop - start for start, stop in shards(split, layout, rank))
        entries.append(replace(split.entry, shape=split.local_shape(size)))
    return with_entries(table, entries)


def unsplit(table: ParameterTable, shape: ModelShape) -> Sequence[Stored]:
    """The entries that every rank has whole."""
    return [split.entry for split in splits(table, shape) if split.axis == "whole"]


def _rank_vision(vision: VisionShape, degree: int) -> VisionShape:
    wide = vision_mlp_width(vision) if vision.architecture == "qwen2_5_vl" else vision.intermediate
    return replace(vision, heads=vision.heads // degree, intermediate=wide // degree, ranks=degree)
