"""What LoadTrainer makes of one of several trainers: its shards of the weights, and what it shares with the others.

    fill          own training shards, read by slices; the header stays empty
    vote          arena: sum of replicas ▸ norm over the ranks of a replica: the same on all trainers
    update        header UPDATING ▸ own shards stepped
    publish       what others own copied in ▸ digest ▸ header, for this device's segment and for its targets
    files         by rank 0 of replica 0 (`leader`)

Owns: this process's share of each. Does not know: steps and their stages, when the others have done theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace
from torch import Tensor

from rollplex.errors import StateError
from rollplex.layout.optimizer import optimizer_table
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.kv import rank_shape
from rollplex.layout.parallel.plan import DevicePlan, LayoutPlan, Parameter, plan
from rollplex.layout.parallel.training import gradient_plan, rank_training_table, reference_plan
from rollplex.memory.tensors import OptimizerViews, optimizer_views
from rollplex.model.device import finish
from rollplex.model.parallel.build import build_parallel
from rollplex.model.parallel.group import meet
from rollplex.model.parallel.views import shard_views
from rollplex.model.parallel.weights import fill_shards
from rollplex.protocol.common import Parallel, Role, SegmentRef
from rollplex.protocol.trainer import LoadTrainer, Restore, Standing
from rollplex.worker.agreement import own_device
from rollplex_trainer.leader import Leader, trained_parameters
from rollplex_trainer.loaded import require_digest
from rollplex_trainer.metrics import StepMetrics
from rollplex_trainer.optimizer import all_finite
from rollplex_trainer.ready import TRAINING_FOLDER, ReadyTrainer, SegmentSource, require_masters, require_standing
from rollplex_trainer.reduction import joint_norm, merge_metrics, sum_replicas
from rollplex_trainer.state_file import STATE_FILE, read_rank_state
from rollplex_trainer.streamed import make_optimizer
from rollplex_trainer.transfer import Copied, Destination, numbers_of, own_destination, target_destination


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What publishing did."""

    digest: str
    """Of this device's segment."""
    copied: Copied


class RankTrainer(ReadyTrainer):
    """One of several trainers, or one that also fills devices which only sample."""

    several = True

    def __init__(self, message: LoadTrainer, segments: SegmentSource) -> None:
        """Meet the others, and fill what this process trains, for a new run or from a checkpoint, or find it filled.

        Raises:
            StaleWeightsError: what is to stand there does not.
            WaitError: the others do not come.
            ConfigError: degrees that the model cannot be split by.
            StateError: this process has another rank than the plan's.
            ModelError, CheckpointError, SegmentError: as of a trainer that is alone.
        """
        super().__init__(message, segments)
        self._segments, self._shards, self._restored = segments, message.shards, message.restore
        self._parallel = message.parallel
        self.place = [f"rank {self._parallel.rank} of replica {self._parallel.replica}"]
        self._layout = TrainingLayout(degree=message.parallel.training)
        self.kv_shape = rank_shape(self.shape, message.parallel.training)
        self._plan = self._plan_of(message.parallel)
        self._own = own_device(self._plan.devices, message.parallel, Role.TRAINER)
        self.total_bytes = self._own.storage.total_bytes
        self._arenas = gradient_plan(self.table, self.shape, self._layout)
        opened = (self._numbers, self._state_views)
        leads = message.parallel.rank == message.parallel.replica == 0
        plans = (self._plan, self._arenas)
        self._leader = Leader(self.table, message.optimizer, message.shards, plans, opened) if leads else None
        self._groups = meet(message.parallel, message.parallel.training, self.device)
        self._destinations = self._open_destinations(segments.run_id)
        """This device's segment first, then the targets."""
        self.header = self._destinations[0].header
        self._published = False
        self._load(message)

    def _open_destinations(self, run_id: str) -> list[Destination]:
        targets = [
            target_destination(
                self._open(target.actor),
                self.table,
                run_id,
                self._plan_of(target.parallel).devices[target.parallel.device],
                self._plan,
            )
            for target in self._shards.targets
        ]
        return [own_destination(self.mapping, self.table, run_id, self._own), *targets]

    def _plan_of(self, place: Parallel) -> LayoutPlan:
        training, rollout = TrainingLayout(degree=place.training), RolloutLayout(degree=place.rollout)
        return plan(self.table, self.shape, training, rollout)

    def _load(self, message: LoadTrainer) -> None:
        own, rank = self._own, message.parallel.rank
        self.weights = shard_views(self._destinations[0].numbers, own.training)
        if message.standing is not None:
            self._require_standing(message.standing)
        else:
            self._fill(message.reference, rank)
        arena = self._arenas.devices[rank]
        self.arena = self._new_numbers(message.gradients, arena)
        self.arena.zero_()
        self.prefix_arena = self._new_numbers(message.prefix_gradients, arena)
        gradients = shard_views(self.arena, arena.training)
        self.model = build_parallel(
            self.folder,
            self.shape,
            self._layout,
            {parameter.name: parameter for parameter in own.training},
            self.weights,
            gradients=gradients,
            group=self._groups.tensor,
        )
        table = rank_training_table(self.table, self.shape, self._layout, rank)
        self._open(message.optimizer_state)
        state = self._state_views(message.optimizer_state, rank)
        self.optimizer = make_optimizer(
            message.optimizer, table, weights=self.weights, gradients=gradients, state=state
        )
        if message.standing is not None:
            require_masters(self.weights, state)
            return
        self.optimizer.reset()
        if message.restore is not None:
            self._restore(message.restore, state)

    def _require_standing(self, standing: Standing) -> None:
        """This device's weights, and those of the devices that this process fills, are there and published."""
        for number, each in enumerate(self._destinations):
            digest = each.header.require(standing.version).digest if number else standing.digest
            require_standing(each.header, each.digest(), replace(standing, digest=digest))
        self._published = True

    def _fill(self, reference: SegmentRef | None, rank: int) -> None:
        fill_shards(self.table, self._own.training, self.weights, self.folder)
        if reference is not None:
            device = reference_plan(self.table, self.shape, self._layout).devices[rank]
            for name, value in shard_views(self._new_numbers(reference, device), device.training).items():
                value.copy_(self.weights[name])

    def _restore(self, restore: Restore, state: OptimizerViews) -> None:
        """This rank's part of a checkpoint. Whether it holds what it says is seen when all ranks have theirs."""
        folder = Path(restore.folder)
        fill_shards(self.table, self._own.training, self.weights, folder)
        whole = optimizer_table(self.table, name=self.settings.name, momentum=self.settings.momentum)
        read_rank_state(folder / TRAINING_FOLDER / STATE_FILE, whole, trained_parameters(self._own), state)
        self.optimizer.restore()

    def sum_step(self, metrics: StepMetrics) -> StepMetrics:
        sum_replicas(self.arena, self._groups.data)
        return merge_metrics(metrics, self._groups.data)

    def gradient_norm(self) -> float:
        return joint_norm(self._counted(), self._groups.tensor)

    def _counted(self) -> Iterator[Tensor]:
        """What this rank counts of the gradients: what every rank has is counted by the first."""
        if self._parallel.rank == 0:
            yield self.arena
            return
        own = [p for p in self._arenas.devices[self._parallel.rank].training if _is_split(p)]
        for gradient in shard_views(self.arena, own).values():
            yield gradient.reshape(-1)

    def begin_update(self, version: int) -> None:
        for destination in self._destinations:
            destination.header.begin_update(version)

    def weights_finite(self) -> bool:
        return all(all_finite(weight) for weight in self.weights.values())

    def end_update(self, version: int, digest: str) -> None:
        """Nothing: `publish` follows, when all ranks have stepped."""

    def poison(self) -> None:
        for destination in self._destinations:
            destination.header.poison()

    def publish(self, version: int) -> Publication:
        """Copy what other ranks own into this device's segment and the targets, and show `version` there.

        Raises:
            StateError: nothing was published before, and `version` is not what was loaded; or something was, and no
                update to `version` is going on.
            CheckpointError: the first is due, and the ranks together have other weights than the checkpoint's.
        """
        first = not self._published
        if first:
            self._require_loaded(version)
        else:
            for each in self._destinations:
                each.require_update(version)
        try:
            sources = [
                self._numbers(ref, device) for ref, device in zip(self._shards.actors, self._plan.devices, strict=True)
            ]
            copied = sum((each.fill(sources, first=first) for each in self._destinations), Copied())
            finish(self.device)
            digests = [each.digest() for each in self._destinations]
            for each, digest in zip(self._destinations, digests, strict=True):
                each.show(version, digest, first=first)
        except BaseException:
            if not first:
                self.poison()
            raise
        self._published = True
        return Publication(digest=digests[0], copied=copied)

    def _require_loaded(self, version: int) -> None:
        wanted = 0 if self._restored is None else self._restored.version
        if version != wanted:
            raise StateError("Another version than the one that was loaded", got=str(version), needed=str(wanted))
        if self._restored is not None and self._leader is not None:
            require_digest(self._leader.digest(), self._restored)

    def digest(self) -> str:
        return self._destinations[0].digest()

    def keep_gradients(self, file: Path) -> int:
        return self._require_leader("keep the gradients").keep_gradients(file)

    def checkpoint_digest(self, version: int) -> str:
        self.header.require(version)
        return self._require_leader("save a checkpoint").digest()

    @property
    def checkpoint_bytes(self) -> int:
        return self._require_leader("save a checkpoint").checkpoint_bytes

    def write_checkpoint(self, folder: Path, state_json: str) -> None:
        self._require_leader("save a checkpoint").write_checkpoint(self.folder, folder, state_json)

    def _require_leader(self, action: str) -> Leader:
        if self._leader is None:
            raise StateError(
                f"This trainer does not {action}",
                got=self.place[0],
                needed="rank 0 of replica 0, which reads the others' segments",
            )
        return self._leader

    def _numbers(self, ref: SegmentRef, device: DevicePlan) -> Tensor:
        return numbers_of(self._segments.attach(ref), self.table, device.storage.total_bytes)

    def _new_numbers(self, ref: SegmentRef, device: DevicePlan) -> Tensor:
        return numbers_of(self._open(ref), self.table, device.storage.total_bytes)

    def _state_views(self, ref: SegmentRef, rank: int) -> OptimizerViews:
        table = rank_training_table(self.table, self.shape, self._layout, rank)
        states = optimizer_table(table, name=self.settings.name, momentum=self.settings.momentum)
        return optimizer_views(self._segments.attach(ref), states)


def _is_split(parameter: Parameter) -> bool:
    """Whether other ranks have other numbers of it."""
    part = next(part for part in parameter.stored.split.parts if part.name == parameter.name)
    return parameter.pieces[0].of != (0, part.size)
