"""What LoadPrefix makes: models over the mapped segments, of the whole model or of one tensor-parallel rank's shards.

Owns which segment each parameter and each gradient is a view of. Does not know units, nor when anything runs.

              weights                                gradients                   K/V of a unit
    whole     the parameter table                    the gradient table          all heads
    a rank    its training shards (parts apart),     its own arena, by           its own heads
              by the plan of both layouts            `gradient_plan`

The reference's trainable parameters lie in a segment of their own, the frozen ones are the actor's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.kv import rank_shape
from rollplex.layout.parallel.plan import DevicePlan, plan
from rollplex.layout.parallel.training import gradient_plan, reference_plan
from rollplex.layout.parameters import ParameterTable, gradient_table, reference_table
from rollplex.layout.shape import ModelShape
from rollplex.memory.digest import digest
from rollplex.memory.header import HeaderPage
from rollplex.memory.tensors import DTYPES, tensor, views
from rollplex.model.build import Model, build
from rollplex.model.device import limit_private
from rollplex.model.parallel.build import build_parallel
from rollplex.model.parallel.group import TensorGroup, meet
from rollplex.model.parallel.views import shard_views
from rollplex.model.setup import prepare_torch
from rollplex.multiprocessors import Multiprocessors
from rollplex.multiprocessors.green import GreenDriver
from rollplex.protocol.common import Parallel, Role, SegmentRef
from rollplex.protocol.prefix import LoadPrefix
from rollplex.worker import Segments
from rollplex.worker.agreement import agreed_model, own_device


@dataclass(frozen=True, kw_only=True)
class Models:
    """Over the mapped segments."""

    actor: Model
    reference: Model | None
    gradients: dict[str, Tensor]
    """The arena, by names of entries or of parts."""


class LoadedPrefix:
    """Everything that a prefix process computes with."""

    def __init__(self, message: LoadPrefix, segments: Segments) -> None:
        """Map the segments and build the models over them; of several ranks, meet the others first.

        Raises:
            StateError: another rank than the plan's.
            ConfigError: degrees that the model cannot be split by.
            WaitError: the other ranks do not come.
            ModelError: a model that cannot be built, or another parameter table than the coordinator's.
            SegmentError: a segment that is not what it should be.
        """
        spec, parallel = message.model, message.parallel
        self.device = prepare_torch(spec)
        # NCCL leaves the context of a share for the device's own, whose stream does not wait for the share's, so that
        # ranks have all multiprocessors.
        shared = self.device.type == "cuda" and parallel.training == 1
        self.multiprocessors = Multiprocessors(GreenDriver if shared else None)
        self.private_bytes = message.private_bytes
        limit_private(self.device, message.private_bytes)
        agreed = agreed_model(spec)
        self.table, shape = agreed.table, agreed.shape
        self.row_width = shape.row_width
        self.kv_shape = rank_shape(shape, parallel.training)
        """Of the K/V heads that this process has."""
        self.temperature = message.temperature
        self.never_sampled = spec.never_sampled
        self.mapping = segments.attach(message.actor)
        self.header = HeaderPage(self.mapping, run_id=segments.run_id, table_hash=self.table.hash)
        self.total_bytes = self.table.total_bytes
        """Of the weights that the segment of this device holds."""
        models = None
        if parallel.training > 1 or parallel.rollout > 1:
            device = _planned(parallel, self.table, shape)
            self.total_bytes = device.storage.total_bytes
            if parallel.training > 1:
                group = meet(parallel, parallel.training, self.device).tensor
                models = _of_rank(message, segments, self.table, shape, device, group=group)
        models = models or _whole(message, segments, self.table)
        self.actor, self.reference, self.gradients = models.actor, models.reference, models.gradients

    def digest(self) -> str:
        """Of the weights, as this process has them mapped."""
        return digest(self.mapping, self.table, self.total_bytes)


def _planned(parallel: Parallel, table: ParameterTable, shape: ModelShape) -> DevicePlan:
    """What the device's segment holds."""
    layouts = TrainingLayout(degree=parallel.training), RolloutLayout(degree=parallel.rollout)
    return own_device(plan(table, shape, *layouts).devices, parallel, Role.PREFIX)


def _whole(message: LoadPrefix, segments: Segments, table: ParameterTable) -> Models:
    """Of a process that has all of the model."""
    spec = message.model
    weights = views(segments.attach(message.actor), table)
    gradients = views(segments.attach(message.gradients), gradient_table(table))

    def made(weights: dict[str, Tensor], gradients: dict[str, Tensor] | None) -> Model:
        return build(Path(spec.path), table, weights, gradients=gradients, freeze_vision=spec.freeze_vision)

    reference = None
    if message.reference is not None:
        own = views(segments.attach(message.reference), reference_table(table))
        reference = made({**weights, **own}, None)
    return Models(actor=made(weights, gradients), reference=reference, gradients=gradients)


def _of_rank(
    message: LoadPrefix,
    segments: Segments,
    table: ParameterTable,
    shape: ModelShape,
    device: DevicePlan,
    *,
    group: TensorGroup,
) -> Models:
    """Of one of several ranks, which has met the others."""
    layout = TrainingLayout(degree=group.size)

    def over(ref: SegmentRef, part: DevicePlan) -> dict[str, Tensor]:
        numbers = part.storage.total_bytes // table.item_bytes
        return shard_views(tensor(segments.attach(ref), 0, (numbers,), DTYPES[table.dtype]), part.training)

    def made(views: dict[str, Tensor], own: DevicePlan | None, gradients: dict[str, Tensor] | None) -> Model:
        parameters = {p.name: p for p in (*device.training, *(() if own is None else own.training))}
        folder = Path(message.model.path)
        return build_parallel(folder, shape, layout, parameters, views, gradients=gradients, group=group)

    weights = over(message.actor, device)
    gradients = over(message.gradients, gradient_plan(table, shape, layout).devices[group.rank])
    reference = None
    if message.reference is not None:
        own = reference_plan(table, shape, layout).devices[group.rank]
        reference = made({**weights, **over(message.reference, own)}, own, None)
    return Models(actor=made(weights, None, gradients), reference=reference, gradients=gradients)
