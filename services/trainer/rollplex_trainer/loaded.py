"""What LoadTrainer makes of a trainer that is alone: the model, arenas and optimizer over the mapped segments.

Owns: filling them for a new run, and the bytes of a checkpoint. Does not know: steps, messages but the one that it is
made from.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from rollplex.errors import CheckpointError
from rollplex.layout.optimizer import optimizer_table
from rollplex.layout.parameters import ParameterTable, gradient_table, reference_table
from rollplex.memory.digest import digest
from rollplex.memory.header import HeaderPage
from rollplex.memory.segment import Mapping
from rollplex.memory.tensors import DTYPES, optimizer_views, tensor, views
from rollplex.model.build import Model, build
from rollplex.model.weights import fill, save_folder
from rollplex.protocol.trainer import LoadTrainer, Restore
from rollplex_trainer.gradient_file import CHUNK_NUMBERS, keep_gradients
from rollplex_trainer.metrics import StepMetrics
from rollplex_trainer.optimizer import all_finite, global_norm
from rollplex_trainer.ready import TRAINING_FOLDER, ReadyTrainer, SegmentSource, require_masters, require_standing
from rollplex_trainer.state_file import STATE_FILE, read_state, write_state
from rollplex_trainer.streamed import make_optimizer


class LoadedTrainer(ReadyTrainer):
    """The one trainer of a run: it has all of the model."""

    several = False

    def __init__(self, message: LoadTrainer, segments: SegmentSource) -> None:
        """Fill the segments, for a new run or from a checkpoint, and publish the version; or find them filled.

        Raises:
            StaleWeightsError: what is to stand there does not.
            ModelError: the folder cannot be loaded, or the coordinator has another parameter table.
            CheckpointError: the checkpoint does not fit this model or optimizer, or holds other weights than it says.
            SegmentError: a segment that is not what it should be.
        """
        super().__init__(message, segments)
        self.kv_shape = self.shape
        self.total_bytes = self.table.total_bytes
        self.header = HeaderPage(self.mapping, run_id=segments.run_id, table_hash=self.table.hash)
        self.weights = views(self.mapping, self.table)
        self.parameters = _flat(self.mapping, self.table)
        if message.standing is not None:
            require_standing(self.header, self.digest(), message.standing)
        else:
            fill(self.table, self.weights, self.folder)
            if message.reference is not None:
                self._fill_reference(segments.attach_new(message.reference))

        arena_table = gradient_table(self.table)
        arena = self._open(message.gradients)
        gradients = self._gradients = views(arena, arena_table)
        self.arena = _flat(arena, arena_table)
        self.arena.zero_()
        self.prefix_arena = _flat(self._open(message.prefix_gradients), arena_table)
        self._freeze_vision = message.model.freeze_vision
        self.model = self._build(plain=False)

        settings = message.optimizer
        self._state_table = optimizer_table(self.table, name=settings.name, momentum=settings.momentum)
        self._state = optimizer_views(self._open(message.optimizer_state), self._state_table)
        self.optimizer = make_optimizer(
            settings, self.table, weights=self.weights, gradients=gradients, state=self._state
        )
        if message.standing is not None:
            require_masters(self.weights, self._state)
            return
        self.optimizer.reset()
        if message.restore is not None:
            self._restore(message.restore)
        self.header.initialise(0 if message.restore is None else message.restore.version, self.digest())

    @cached_property
    def plain_model(self) -> Model:
        """transformers' own model over the same weights and gradients; made when it is first asked for."""
        return self._build(plain=True)

    def sum_step(self, metrics: StepMetrics) -> StepMetrics:
        return metrics

    def gradient_norm(self) -> float:
        return global_norm(self.arena)

    def keep_gradients(self, file: Path) -> int:
        return keep_gradients(torch.split(self.arena, CHUNK_NUMBERS), file, self.arena.nbytes)

    def begin_update(self, version: int) -> None:
        self.header.begin_update(version)

    def weights_finite(self) -> bool:
        return all_finite(self.parameters)

    def end_update(self, version: int, digest: str) -> None:
        self.header.publish(version, digest)

    def poison(self) -> None:
        self.header.poison()

    def digest(self) -> str:
        return digest(self.mapping, self.table)

    def checkpoint_digest(self, version: int) -> str:
        return self.header.require(version).digest

    @property
    def checkpoint_bytes(self) -> int:
        return self.table.total_bytes + self._state_table.total_bytes

    def write_checkpoint(self, folder: Path, state_json: str) -> None:
        save_folder(self.table, self.weights, self.folder, folder)
        inner = folder / TRAINING_FOLDER
        inner.mkdir()
        write_state(inner / STATE_FILE, self._state, optimizer=self._state_table.name)
        (inner / "state.json").write_text(state_json, encoding="utf-8")

    def _restore(self, restore: Restore) -> None:
        """Actor weights and optimizer state as a checkpoint has them. The reference stays that of the model folder."""
        folder = Path(restore.folder)
        fill(self.table, self.weights, folder)
        require_digest(self.digest(), restore)
        read_state(folder / TRAINING_FOLDER / STATE_FILE, self._state, optimizer=self._state_table.name)
        self.optimizer.restore()

    def _build(self, *, plain: bool) -> Model:
        return build(
            self.folder,
            self.table,
            self.weights,
            gradients=self._gradients,
            freeze_vision=self._freeze_vision,
            plain=plain,
        )

    def _fill_reference(self, mapping: Mapping) -> None:
        """The trainable weights as they are now; frozen ones are read from the actor's segment."""
        for name, value in views(mapping, reference_table(self.table)).items():
            value.copy_(self.weights[name])


def require_digest(found: str, restore: Restore) -> None:
    """Whether weights are those of a checkpoint. found: their digest. Raises CheckpointError."""
    if found != restore.digest:
        raise CheckpointError(
            "This checkpoint holds other weights than its manifest says",
            got=f"digest {found}",
            needed=restore.digest,
            do="Use another one.",
            where=restore.folder,
        )


def _flat(mapping: Mapping, table: ParameterTable) -> Tensor:
    """All numbers of a segment after its header as one tensor, alignment gaps (0) included."""
    dtype = DTYPES[table.dtype]
    count = (table.total_bytes - table.header_bytes) // dtype.itemsize
    return tensor(mapping, table.header_bytes, (count,), dtype)
