"""What rank 0 of replica 0 writes for all: the files and the digest of one device, from everybody's segments.

The others stand still meanwhile. Owns: which segments are read for what. Does not know: steps, headers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from rollplex.layout.optimizer import optimizer_table
from rollplex.layout.parallel.plan import DevicePlan, LayoutPlan, Parameter
from rollplex.layout.parameters import ParameterTable, gradient_table
from rollplex.memory.tensors import OptimizerViews
from rollplex.model.parallel.views import shard_views
from rollplex.protocol.common import SegmentRef
from rollplex.protocol.trainer import Optimizer, Shards
from rollplex_trainer.assembled import WholeTensors, arena_parts, whole_digest, write_weights, write_whole_state
from rollplex_trainer.gradient_file import keep_gradients
from rollplex_trainer.ready import TRAINING_FOLDER
from rollplex_trainer.state_file import STATE_FILE

Numbers = Callable[[SegmentRef, DevicePlan], Tensor]
"""All of a segment as one row of numbers."""
States = Callable[[SegmentRef, int], OptimizerViews]
"""The optimizer state of a rank, by names of parts."""


class Leader:
    """Reads the segments of all ranks of its replica."""

    def __init__(
        self,
        table: ParameterTable,
        settings: Optimizer,
        shards: Shards,
        plans: tuple[LayoutPlan, LayoutPlan],
        opened: tuple[Numbers, States],
    ) -> None:
        """plans: of the weights, whose devices of the leader's replica are read, and of the gradients."""
        self._table = table
        self._shards = shards
        weights, self._arenas = plans
        self._devices = [device for device in weights.devices if device.ranks.replica == 0]
        self._numbers, self._state_views = opened
        self.states = optimizer_table(table, name=settings.name, momentum=settings.momentum)
        """Of the whole model."""

    def digest(self) -> str:
        """Of the weights, as one device would have them."""
        return whole_digest(self._table, self._weights())

    def keep_gradients(self, file: Path) -> int:
        """Write the arena that one device would have. Returns the file's bytes. Raises UpdateError."""
        table = gradient_table(self._table)
        gradients = self._whole(self._shards.gradients, self._arenas.devices)
        return keep_gradients(arena_parts(table, gradients), file, table.total_bytes)

    @property
    def checkpoint_bytes(self) -> int:
        """About what `write_checkpoint` writes."""
        return self._table.total_bytes + self.states.total_bytes

    def write_checkpoint(self, source: Path, folder: Path, state_json: str) -> None:
        """Fill a folder. source: of the model. Raises CheckpointError, OSError."""
        write_weights(self._table, self._weights(), source, folder)
        inner = folder / TRAINING_FOLDER
        inner.mkdir()
        views = [self._state_views(ref, rank) for rank, ref in enumerate(self._shards.states)]
        trained = [trained_parameters(device) for device in self._devices]
        kinds = {
            kind: WholeTensors(zip(trained, (view.states[kind] for view in views), strict=True))
            for kind in self.states.kinds
        }
        write_whole_state(inner / STATE_FILE, self._table, self.states, kinds, views[0].step)
        (inner / "state.json").write_text(state_json, encoding="utf-8")

    def _weights(self) -> WholeTensors:
        refs = [self._shards.actors[device.ranks.device] for device in self._devices]
        return self._whole(refs, self._devices)

    def _whole(self, refs: Sequence[SegmentRef], devices: Iterable[DevicePlan]) -> WholeTensors:
        def one(ref: SegmentRef, device: DevicePlan) -> tuple[Sequence[Parameter], Mapping[str, Tensor]]:
            return device.training, shard_views(self._numbers(ref, device), device.training)

        return WholeTensors(one(ref, device) for ref, device in zip(refs, devices, strict=True))


def trained_parameters(device: DevicePlan) -> list[Parameter]:
    """What a device's trainer has optimizer state for."""
    return [parameter for parameter in device.training if parameter.trained]
