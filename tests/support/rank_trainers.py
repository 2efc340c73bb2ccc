"""Trainer services on several devices: the segments of a node, and what one rank's process has of them.

A node's segments are made before its processes are forked; memory is all that they have in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from rollplex.layout.optimizer import optimizer_table
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout, group
from rollplex.layout.parallel.kv import rank_shape
from rollplex.layout.parallel.plan import plan
from rollplex.layout.parallel.training import gradient_plan, rank_training_table, reference_plan
from rollplex.layout.parameters import parameter_table
from rollplex.layout.shape import ModelShape, read_shape
from rollplex.memory.header import HeaderPage
from rollplex.memory.tensors import DTYPES, tensor
from rollplex.model.parallel.build import build_parallel
from rollplex.model.parallel.views import shard_views
from rollplex.protocol.common import Kind, ModelSpec, Parallel, SegmentRef
from rollplex.protocol.trainer import LoadTrainer, Publish, Published, Restore, Shards, Standing, Target
from rollplex_trainer.service import TrainerService
from support.optimizers import ADAMW
from support.segments import HostSegments
from support.tiny import NEVER_SAMPLED, Prompt, make_prompts
from support.trainer import ALGORITHM, PROMPTS, World, sampled, train_all

DEADLINE_S = 60.0
SETTINGS = msgspec.structs.replace(ADAMW, eps=1e-3)
"""Some gradients are rounding alone (a shift of all keys changes nothing), and AdamW would make whole steps of them."""


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """A trainer's device: where it stands and its segments."""

    parallel: Parallel
    actor: SegmentRef
    reference: SegmentRef
    gradients: SegmentRef
    prefix_gradients: SegmentRef
    state: SegmentRef


class Node:
    """The devices of one job. Made before processes are forked: memory is all that they have in common."""

    def __init__(self, folder: Path, job: dict[str, Any], ranks: int) -> None:
        self.job, self.folder, self.segments = job, folder / "model", HostSegments()
        self.shape: ModelShape = read_shape(self.folder)
        self.table = parameter_table(self.shape, dtype=job["dtype"], freeze_vision=job.get("frozen", False))
        self.layout, self.rollout = TrainingLayout(degree=job["training"]), RolloutLayout(degree=job["rollout"])
        self.plan = plan(self.table, self.shape, self.layout, self.rollout)
        meet = str(folder / f"meet.{job['number']}")
        self.devices = [self._device(number, ranks, meet) for number in range(ranks)]
        degree = job.get("target", 0)
        self.target_plan = plan(
            self.table, self.shape, TrainingLayout(degree=degree or 1), RolloutLayout(degree=degree or 1)
        )
        self.targets = [self._target(degree, number) for number in range(2 if degree else 0)]

    def _device(self, number: int, ranks: int, meet: str) -> OnDevice:
        size = len(self.plan.devices)
        place = group(self.layout, self.rollout)[number % size]
        rank, degree = place.training, self.layout.degree
        table = rank_training_table(self.table, self.shape, self.layout, rank)
        arena = gradient_plan(self.table, self.shape, self.layout).devices[rank].storage.total_bytes
        reference = reference_plan(self.table, self.shape, self.layout).devices[rank].storage.total_bytes
        make = self.segments.create
        return OnDevice(
            parallel=Parallel(
                training=degree,
                rollout=self.rollout.degree,
                device=number % size,
                rank=rank,
                replica=number // size * (size // degree) + place.replica,
                replicas=ranks // degree,
                meet=meet,
                collective_s=DEADLINE_S,
            ),
            actor=make(Kind.ACTOR_WEIGHTS, self.plan.devices[number % size].storage.total_bytes),
            reference=make(Kind.REFERENCE_WEIGHTS, reference),
            gradients=make(Kind.GRADIENTS, arena),
            prefix_gradients=make(Kind.GRADIENTS, arena),
            state=make(Kind.OPTIMIZER_STATE, optimizer_table(table, name=SETTINGS.name, momentum=0.0).total_bytes),
        )

    def _target(self, degree: int, number: int) -> Target:
        device = number % degree
        actor = self.segments.create(Kind.ACTOR_WEIGHTS, self.target_plan.devices[device].storage.total_bytes)
        return Target(actor=actor, parallel=Parallel(training=degree, rollout=degree, device=device, rank=device))

    def shards(self, number: int) -> Shards:
        """As the coordinator tells the trainer of a device."""
        own, size = self.devices[number].parallel, len(self.plan.devices)
        first = number - own.device
        team = sorted(
            (one for one in self.devices if one.parallel.replica == own.replica), key=lambda one: one.parallel.rank
        )
        return Shards(
            actors=tuple(one.actor for one in self.devices[first : first + size]),
            gradients=tuple(one.gradients for one in team),
            states=tuple(one.state for one in team),
            targets=tuple(self.targets[own.rank :: own.training]) if own.replica == 0 else (),
        )

    def numbers(self, ref: SegmentRef) -> Tensor:
        """All of a segment of weights or gradients, in a mapping of its own."""
        dtype = DTYPES[self.table.dtype]
        return tensor(self.segments.map_again(ref), 0, (ref.size_bytes // dtype.itemsize,), dtype)


class RankWorld(World):
    """One rank's trainer service."""

    def __init__(self, node: Node, number: int, restore: Restore | None) -> None:
        # World's own is not called: it makes the segments of a trainer that is alone.
        self.node, self.own, self.folder = node, node.devices[number], node.folder
        self.parallel, self.segments, self.table = self.own.parallel, node.segments, node.table
        self.shape = rank_shape(node.shape, self.parallel.training)
        self.algorithm = ALGORITHM
        every = prompts_of(self.folder)
        mine = range(self.parallel.replica, len(every), self.parallel.replicas)
        self.prompts = [numbered(every[n], at) for at, n in enumerate(mine)]
        self.groups = [sampled(n) for n in mine]
        self.load = LoadTrainer(
            cause=1,
            model=ModelSpec(
                path=str(self.folder),
                dtype=self.table.dtype,
                freeze_vision=node.job.get("frozen", False),
                table_hash=self.table.hash,
                never_sampled=NEVER_SAMPLED,
            ),
            actor=self.own.actor,
            reference=self.own.reference,
            gradients=self.own.gradients,
            prefix_gradients=self.own.prefix_gradients,
            optimizer_state=self.own.state,
            algorithm=self.algorithm,
            optimizer=SETTINGS,
            restore=restore,
            parallel=self.parallel,
            shards=node.shards(number),
        )
        self.service = TrainerService(self.segments)
        self.loaded = self.send(self.load)
        self.pages = self.segments.map_again(self.own.actor)
        self.header = HeaderPage(self.pages, run_id=self.segments.run_id, table_hash=self.table.hash)
        device = node.plan.devices[self.parallel.device]
        self.weights = shard_views(node.numbers(self.own.actor), device.training)
        arena = gradient_plan(self.table, node.shape, node.layout).devices[self.parallel.rank]
        self.gradients = shard_views(node.numbers(self.own.gradients), arena.training)
        self.prefix_gradients = shard_views(node.numbers(self.own.prefix_gradients), arena.training)
        self.prefix_model = self._make_prefix_model()

    def _make_prefix_model(self) -> Any:
        node = self.node
        return build_parallel(
            self.folder,
            node.shape,
            node.layout,
            {parameter.name: parameter for parameter in node.plan.devices[self.parallel.device].training},
            self.weights,
            gradients=self.prefix_gradients,
            group=self.ready._groups.tensor,
        )

    def replace_trainer(self, standing: Standing, meet: str) -> None:
        """A new trainer service over the same segments takes the place of this one's, and the old ranks' groups end.

        Raises: as LoadTrainer.
        """
        dist.barrier()
        dist.destroy_process_group()
        self.service = TrainerService(self.segments)
        parallel = replace(self.parallel, meet=meet)
        self.send(replace(self.load, restore=None, standing=standing, parallel=parallel))
        self.prefix_model = self._make_prefix_model()

    @property
    def ready(self) -> Any:
        return self.service._ready

    @property
    def leads(self) -> bool:
        return self.parallel.rank == self.parallel.replica == 0

    def train(self, version: int) -> None:
        if self.prompts:
            train_all(self, self.groups, (len(self.groups),), version=version)
        else:
            self.clear_prefix_arena()

    def publish(self, version: int) -> Published:
        answer: Published = self.send(Publish(cause=60, version=version))
        return answer


def prompts_of(folder: Path) -> list[Prompt]:
    return make_prompts(folder, PROMPTS)


def numbered(prompt: Prompt, group_number: int) -> Prompt:
    """The same prompt as another group."""
    prompt.slot = msgspec.structs.replace(prompt.slot, group=group_number)
    return prompt
