"""What LoadTrainer makes: the model, arenas and optimizer over the mapped segments.

Owns: filling them for a new run, and the bytes of a checkpoint. Does not know: steps, messages but the one that it is
made from.
"""

from __future__ import annotations

import platform
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rollplex.errors import CheckpointError, ModelError
from rollplex.layout.optimizer import optimizer_table
from rollplex.layout.parameters import ParameterTable, gradient_table, parameter_table, reference_table
from rollplex.layout.shape import read_shape
from rollplex.memory.digest import digest
from rollplex.memory.header import HeaderPage
from rollplex.memory.segment import Mapping
from rollplex.memory.tensors import DTYPES, optimizer_views, tensor, views
from rollplex.model.build import Model, build
from rollplex.model.device import limit_private
from rollplex.model.setup import prepare_torch
from rollplex.model.weights import fill, save_folder
from rollplex.protocol.common import SegmentRef
from rollplex.protocol.trainer import LoadTrainer, Restore
from rollplex_trainer.optimizer import SegmentOptimizer
from rollplex_trainer.state_file import STATE_FILE, read_state, write_state

_DECIDING = (
    "av",
    "jinja2",
    "numpy",
    "pillow",
    "rollplex",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
)
"""Packages that pixels, prompts, token ids or numbers come from."""
TRAINING_FOLDER = "training"
"""Inside a checkpoint; engines that read every *.safetensors of a model folder must not meet the optimizer's."""


class SegmentSource(Protocol):
    """What the trainer needs of `rollplex.worker.Segments`."""

    @property
    def run_id(self) -> str: ...

    def attach(self, ref: SegmentRef) -> Mapping: ...

    def attach_new(self, ref: SegmentRef) -> Mapping: ...

    def detach(self, segment: int) -> None: ...


class LoadedTrainer:
    """Everything of one trainer that lasts longer than a step."""

    def __init__(self, message: LoadTrainer, segments: SegmentSource) -> None:
        """Fill the segments, for a new run or from a checkpoint, and publish the version.

        Raises:
            ModelError: the folder cannot be loaded, or the coordinator has another parameter table.
            CheckpointError: the checkpoint does not fit this model or optimizer, or holds other weights than it says.
            SegmentError: a segment that is not what it should be.
        """
        spec = message.model
        self.device = prepare_torch(spec)
        self.private_bytes = message.private_bytes
        limit_private(self.device, message.private_bytes)
        self.algorithm = message.algorithm
        self.settings = message.optimizer
        self.never_sampled = spec.never_sampled
        self.folder = Path(spec.path)
        self.shape = read_shape(self.folder)
        self.table = parameter_table(self.shape, dtype=spec.dtype, freeze_vision=spec.freeze_vision)
        if self.table.hash != spec.table_hash:
            raise ModelError(
                "This process and the coordinator disagree about the parameter table",
                got=self.table.hash,
                needed=spec.table_hash,
                do="Run the same version of Rollplex and the same model folder everywhere",
                where=spec.path,
            )
        self.mapping = segments.attach_new(message.actor)
        self.header = HeaderPage(self.mapping, run_id=segments.run_id, table_hash=self.table.hash)
        self.weights = views(self.mapping, self.table)
        self.parameters = _flat(self.mapping, self.table)
        fill(self.table, self.weights, self.folder)
        if message.reference is not None:
            self._fill_reference(segments.attach_new(message.reference))

        arena_table = gradient_table(self.table)
        arena = segments.attach_new(message.gradients)
        gradients = self._gradients = views(arena, arena_table)
        self.arena = _flat(arena, arena_table)
        self.arena.zero_()
        self.prefix_arena = _flat(segments.attach_new(message.prefix_gradients), arena_table)
        self._freeze_vision = spec.freeze_vision
        self.model = self._build(plain=False)

        settings = message.optimizer
        self._state_table = optimizer_table(self.table, name=settings.name, momentum=settings.momentum)
        self._state = optimizer_views(segments.attach_new(message.optimizer_state), self._state_table)
        self.optimizer = SegmentOptimizer(
            settings, self.table, weights=self.weights, gradients=gradients, state=self._state
        )
        self.optimizer.reset()
        if message.restore is not None:
            self._restore(message.restore)
        self.header.initialise(0 if message.restore is None else message.restore.version, self.digest())

    @cached_property
    def plain_model(self) -> Model:
        """transformers' own model over the same weights and gradients; made when it is first asked for."""
        return self._build(plain=True)

    def digest(self) -> str:
        """Of the weights as they lie in the segment now."""
        return digest(self.mapping, self.table)

    @property
    def checkpoint_bytes(self) -> int:
        """About what `write_checkpoint` writes."""
        return self.table.total_bytes + self._state_table.total_bytes

    def write_checkpoint(self, folder: Path, state_json: str) -> None:
        """Fill a folder: the model as `from_pretrained` wants it, and under `training` the optimizer's state (names
        `<kind>.<stored name>`, and `step`) and what the coordinator keeps.

        Raises:
            CheckpointError: a file cannot be written.
        """
        save_folder(self.table, self.weights, self.folder, folder)
        inner = folder / TRAINING_FOLDER
        inner.mkdir()
        write_state(inner / STATE_FILE, self._state, optimizer=self._state_table.name)
        (inner / "state.json").write_text(state_json, encoding="utf-8")

    def _restore(self, restore: Restore) -> None:
        """Actor weights and optimizer state as a checkpoint has them. The reference stays that of the model folder."""
        folder = Path(restore.folder)
        fill(self.table, self.weights, folder)
        if (found := self.digest()) != restore.digest:
            raise CheckpointError(
                "This checkpoint holds other weights than its manifest says",
                got=f"digest {found}",
                needed=restore.digest,
                do="Use another one.",
                where=restore.folder,
            )
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


def libraries(device: torch.device) -> dict[str, str]:
    """Versions of what decides the numbers of a run, for the manifest of a checkpoint."""
    return {
        "python": platform.python_version(),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        **_gpu(device),
        **{name: _version(name) for name in _DECIDING},
    }


def _gpu(device: torch.device) -> dict[str, str]:
    if device.type != "cuda":
        return {}
    return {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _flat(mapping: Mapping, table: ParameterTable) -> Tensor:
    """All numbers of a segment after its header as one tensor, alignment gaps (0) included."""
    dtype = DTYPES[table.dtype]
    count = (table.total_bytes - table.header_bytes) // dtype.itemsize
    return tensor(mapping, table.header_bytes, (count,), dtype)
